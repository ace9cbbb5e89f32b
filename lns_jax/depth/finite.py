"""Refusal of weights and of states that are not finite, naming the tensor, or layer, sequence and token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.errors import UserError
from lns_jax.models import by_layer, layout, transformer


def first_bad(states: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """[S, B, T, D] -> [B, S]: the first position that counts and whose state is not finite, -1 where all are."""
  bad = jnp.any(~jnp.isfinite(states), axis=-1) & (mask_BT > 0)
  return jnp.where(jnp.any(bad, axis=-1), jnp.argmax(bad, axis=-1), -1).T


@functools.partial(jax.jit, static_argnums=0)
def states(config: ModelConfig, params, batch) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(states [L + 1, B, T, D], real tokens [B, T], `first_bad` of these [B, L + 1])."""
  mask_BT = transformer.family(config).real_tokens(config, batch)
  found = transformer.states(config, params, transformer.inputs(config, batch), **transformer.placement(batch))
  return found, mask_BT, first_bad(found, mask_BT)


def check(config: ModelConfig, params, positions: np.ndarray, sequences: int):
  """Raises UserError for a state that is not finite, which names a weight that is not, else the first such state.

  Args:
    positions: [B, L + 1] from `first_bad`, behind `sequences` other sequences.
  """
  bad = positions >= 0
  if not bad.any():
    return
  check_weights(params)
  state = int(np.argmax(bad.any(axis=0)))
  row = int(np.argmax(bad[:, state]))
  place = f'layer {config.layer_ids[state - 1]}' if state else 'the embedding'
  where = f'token {positions[row, state]} of sequence {sequences + row}'
  raise UserError(f'the output of {place} is not finite at {where}.')


def check_weights(params, model: str = ''):
  """Raises UserError that names the first tensor with a number that is not finite; params: in either layout."""
  if all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(params)):
    return
  for path, leaf in by_layer.leaves(layout.unstack(params)):
    if not jnp.all(jnp.isfinite(leaf)):
      raise UserError(f"{model}{': ' if model else ''}the weight {path} is not finite.")
