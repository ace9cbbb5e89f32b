"""Decoding with a cache: the same blocks, whose keys and values of earlier tokens are kept.

A row's token at position p has its keys in slot p of the row, whatever the other rows' lengths are. So a row gets the
same numbers in a batch as alone, and what padding leaves behind a row's last token is overwritten before anyone may
see it: a query sees the slots up to its own position.
"""

import dataclasses
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.layers import attention, block, param
from lns_jax.models import layout, transformer


class Cache(typing.NamedTuple):
  """What is kept of B rows of at most S tokens.

  layers: by name, as params['layers'] are, {'attn': {'k', 'v'}} of [B, K, S, h] in the compute type; stacked layers
    have a leading axis.
  lengths_B: int32, tokens of each row so far.
  """

  layers: dict
  lengths_B: jax.Array


def init(config: config_lib.ModelConfig, B: int, S: int) -> Cache:
  """An empty cache for B rows of at most S tokens, in the layout of the config's loop.

  Raises:
    UserError: the model does not predict next tokens.
  """
  if config.family != 'decoder' or not config.causal:
    kind = f'of family {config.family}' if config.family != 'decoder' else 'with model.causal = False'
    raise UserError(f'a model {kind} predicts no next token, so that there is nothing to generate with it.')
  empty = jnp.zeros((B, config.num_kv_heads, S, config.head_dim), param.dtypes(config)[1])
  tree = {'layers': {str(l): {'attn': {'k': empty, 'v': empty}} for l in config.layer_ids}}
  # Copies: a buffer that is given away may occur once.
  return Cache(jax.tree.map(jnp.copy, layout.native(tree, config)['layers']), jnp.zeros(B, jnp.int32))


def extend(config: config_lib.ModelConfig, params, tokens_BT: jax.Array, cache: Cache, counts_B: jax.Array | None = None,
           *, last: bool = False) -> tuple[jax.Array, Cache]:
  """Appends tokens to each row: a prompt, a part of one, or the token that was chosen last.

  Args:
    params: in the layout of the cache.
    counts_B: how many of a row's T tokens are its own, the first ones; all by default. What stands behind them is
      padding, but takes slots: the longest row before the call and T must fit into S together.
    last: whether only the logits behind each row's last own token are wanted.

  Returns:
    (logits [B, T, V], or [B, V] with `last`, float32; the cache). Logits of a row that does not fit are NaN.
  """
  config = dataclasses.replace(config, remat='none')
  T, start_B = tokens_BT.shape[1], cache.lengths_B
  counts_B = jnp.full_like(start_B, T) if counts_B is None else counts_B
  x_BTD, ctx = _enter(config, params, tokens_BT, start_B[:, None] + jnp.arange(T))
  def step(tree, x, layer, factors):
    p, kept = tree
    (x, _), changed = block.Block(config).apply({'params': p, 'cache': kept}, x, ctx, layer, factors, mutable='cache')
    return nn.with_logical_constraint(x, transformer.STREAM), changed['cache']
  trees = {name: (params['layers'][name], kept) for name, kept in cache.layers.items()}
  x_BTD, kept = transformer.walk(config, trees, x_BTD, step)
  fits_B = start_B + T <= jax.tree.leaves(kept)[0].shape[-2]
  if last:
    x_BTD = jnp.take_along_axis(x_BTD, jnp.maximum(counts_B - 1, 0)[:, None, None], axis=1)
  logits_BTV = jnp.where(fits_B[:, None, None], transformer.head(config, params, x_BTD), jnp.nan)
  return logits_BTV[:, 0] if last else logits_BTV, Cache(kept, start_B + counts_B)


def _enter(config, params, tokens_BT, positions_BT):
  x_BTD = transformer.embed(config, params, tokens_BT)
  return x_BTD, attention.context(config, x_BTD, None, positions_BT=positions_BT)
