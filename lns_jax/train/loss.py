"""Every loss term is (sum, weight); whoever reports or differentiates divides once."""

import jax
import jax.numpy as jnp


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Weighted sum of -log p(target) in nats, and the sum of the weights.

  Where the weight is 0 the target is not read: an ignore label such as -100 there yields neither a
  NaN nor the last class.
  """
  targets_BT = jnp.where(weights_BT > 0, targets_BT, 0)
  normaliser = jax.nn.logsumexp(logits_BTV, axis=-1)
  chosen = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
  return jnp.sum((normaliser - chosen) * weights_BT), jnp.sum(weights_BT)


def mean(total, weight):
  """total / weight, and 0 where nothing was weighed (a batch of padding alone)."""
  return total / jnp.maximum(weight, 1)
