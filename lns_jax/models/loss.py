"""Every loss term is (sum, weight); whoever reports or differentiates divides once."""

import jax
import jax.numpy as jnp


def token_losses(logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
  """weight * -log p(target) in nats, [B, T].

  Where the weight is 0 the target is not read: an ignore label such as -100 there yields neither a
  NaN nor the last class.
  """
  targets_BT = jnp.where(weights_BT > 0, targets_BT, 0)
  normaliser = jax.nn.logsumexp(logits_BTV, axis=-1)
  chosen = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
  return (normaliser - chosen) * weights_BT


def weights(batch) -> jax.Array:
  """Loss weights [B, T] float32: given, or 1 on every token that is not padding."""
  return batch['weights'] if 'weights' in batch else (batch['segment_ids'] > 0).astype(jnp.float32)


def mean(total, weight):
  """total / weight, and 0 where nothing was weighed (a batch of padding alone)."""
  return total / jnp.maximum(weight, 1)
