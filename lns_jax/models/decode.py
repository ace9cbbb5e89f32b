"""Decoding with a cache: the same blocks, whose keys and values of earlier tokens are kept.

All rows of a batch take a slot for each token, so that the cache is written at one place; a row that is shorter than
the others begins later, behind padding that nobody sees.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import config as config_lib
from lns_jax import mesh
from lns_jax.errors import UserError
from lns_jax.layers import attention, block, param
from lns_jax.models import layout, loop, transformer


class Cache(typing.NamedTuple):
  """What is kept of B rows in S slots.

  layers: by name, as params['layers'] are, {'attn': {'k': [B * K, S, h], 'v': [B * K, h, S]}} in the compute type;
    stacked layers have a leading axis.
  past: the slots that are taken, and where each row begins.
  """

  layers: dict
  past: attention.Past


def init(config: config_lib.ModelConfig, B: int, S: int, first_B=None) -> Cache:
  """An empty cache of S slots for B rows, in the layout of the config's loop.

  first_B: the slot of each row's first token; 0 by default. Rows of different lengths end together: the row of n
    tokens beside one of N begins at N - n, and what `extend` gets before that is padding.

  Raises:
    UserError: the model does not predict next tokens.
  """
  if config.family != 'decoder' or not config.causal:
    kind = f'of family {config.family}' if config.family != 'decoder' else 'with model.causal = False'
    raise UserError(f'a model {kind} predicts no next token, so that there is nothing to generate with it.')
  rows, h, dtype = B * config.num_kv_heads, config.head_dim, param.dtypes(config)[1]
  empty = {'k': np.zeros((rows, S, h), dtype), 'v': np.zeros((rows, h, S), dtype)}
  tree = {'layers': {str(l): {'attn': empty} for l in config.layer_ids}}
  # Each its own buffer: one that is donated may occur once.
  layers = jax.tree.map(jnp.array, layout.native(tree, config)['layers'])
  first_B = jnp.zeros(B, jnp.int32) if first_B is None else jnp.array(first_B, jnp.int32)
  return Cache(layers, attention.Past(jnp.zeros((), jnp.int32), first_B))


def slots(cache: Cache) -> int:
  """S."""
  return next(iter(cache.layers.values()))['attn']['k'].shape[-2]


def extend(config: config_lib.ModelConfig, params, tokens_BT: jax.Array, cache: Cache,
           *, last: bool = False) -> tuple[jax.Array, Cache]:
  """Appends T tokens to each row: prompts, a part of them, or the tokens that were chosen last.

  Args:
    params: in the layout of the cache.
    last: whether only the last token's logits are wanted.

  Returns:
    (logits [B, T, V], or [B, V] with `last`, float32; the cache). Once there are more tokens than slots, all are NaN.
  """
  config, past = dataclasses.replace(config, remat='none'), cache.past
  x_BTD, ctx = transformer.enter(config, params, tokens_BT, past=past)
  def step(variables, x, ctx, layer, factors):
    (x, _), changed = block.Block(config).apply(variables, x, ctx, layer, factors, mutable='cache')
    return mesh.constrain(x, transformer.STREAM), changed['cache']
  variables = {name: {'params': params['layers'][name], 'cache': kept} for name, kept in cache.layers.items()}
  x_BTD, layers = loop.walk(config, variables, x_BTD, ctx, step)
  past = past._replace(taken=past.taken + tokens_BT.shape[1])
  fits = past.taken <= slots(cache)
  logits_BTV = transformer.head(config, params, jnp.where(fits, x_BTD[:, -1:] if last else x_BTD, jnp.nan))
  return logits_BTV[:, 0] if last else logits_BTV, Cache(layers, past)
