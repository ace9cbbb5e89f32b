"""Jacobians written out by jax.jacfwd, for tests: of canonical blocks, one real row at a time."""

import jax
import numpy as np

from lns_jax.layers import attention, block
from lns_jax.models import layout, transformer
from tiny import batch, model, params

SMALL = dict(d_model=8, d_ff=12, num_heads=2, num_kv_heads=1)
VIT = dict(family='vit', causal=False, norm='layernorm', bias='all', mlp='gelu', image_size=4, patch_size=2,
           num_classes=5)


def without_layer_2(**changes):
  """(config, params) of layers 1, 3 and 4 of 4."""
  whole = model(**SMALL, num_layers=4, **changes)
  return transformer.remove_layers(whole, params(whole), [2])


def small_batch() -> dict:
  """Rows of 6 tokens: two documents, the second and third with padding."""
  return batch(rows=3, T=6, seed=1)


def by_row(config, params, b) -> list[list[np.ndarray]]:
  """For each row with real tokens, for each layer: dy / dx over its n real tokens, [n D, n D] in float64."""
  p = layout.unstack(params)
  x = transformer.enter(config, p, transformer.inputs(config, b))[0]
  real = np.asarray(transformer.family(config).real_tokens(config, b)) > 0
  ids = b.get('segment_ids')
  def of_layer(l):
    def one(x, ids):
      ctx = attention.context(config, x[None], None if ids is None else ids[None])
      f = lambda h: block.Block(config).apply({'params': p['layers'][str(l)]}, h[None], ctx, l)[0][0]
      return f(x), jax.jacfwd(f)(x)
    return jax.jit(jax.vmap(one, in_axes=(0, None if ids is None else 0)))
  found = [[] for _ in real]
  for l in config.layer_ids:
    x, J = of_layer(l)(x, ids)
    for row, r in enumerate(real):
      kept = np.repeat(r, config.d_model)
      found[row].append(np.asarray(J[row], np.float64).reshape(len(kept), -1)[kept][:, kept])
  return [f for f, r in zip(found, real) if r.any()]
