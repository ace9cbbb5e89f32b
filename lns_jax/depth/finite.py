"""Refusal of states that are not finite, naming layer and sequence."""

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.errors import UserError


def by_sequence(states: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """[S, B, T, D] -> [B, S]: whether a state is finite on all tokens that count."""
  return jnp.all(jnp.isfinite(states) | (mask_BT == 0)[..., None], axis=(2, 3)).T


def check(config: ModelConfig, finite: np.ndarray, sequences: int):
  """Raises UserError for the first state that is not finite; finite: [B, L + 1], behind `sequences` others."""
  if not finite.all():
    state = int(np.argmin(finite.all(axis=0)))
    place = f'layer {config.layer_ids[state - 1]}' if state else 'the embedding'
    raise UserError(f'the output of {place} is not finite in sequence {sequences + int(np.argmin(finite[:, state]))}.')
