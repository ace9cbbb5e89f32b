"""Every loss term is (sum, weight); whoever reports or differentiates divides once."""

import jax
import jax.numpy as jnp

from lns_jax.errors import UserError
from lns_jax.layers import param


def token_losses(logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
  """weight * -log p(target) in nats, [B, T].

  Where the weight is 0 the target is not read: an ignore label such as -100 there yields neither a
  NaN nor the last class. A weighed target outside of the vocabulary is NaN, which stops a run.
  """
  targets_BT = jnp.where(weights_BT > 0, targets_BT, 0)
  outside = outside_vocabulary(targets_BT, logits_BTV.shape[-1])
  normaliser = jax.nn.logsumexp(logits_BTV, axis=-1)
  chosen = jnp.take_along_axis(logits_BTV, jnp.where(outside, 0, targets_BT)[..., None], axis=-1)[..., 0]
  return jnp.where(outside, jnp.nan, normaliser - chosen) * weights_BT


def outside_vocabulary(ids, V: int):
  """Where token ids are none of 0..V-1."""
  return (ids < 0) | (ids >= V)


def weights(batch) -> jax.Array:
  """Loss weights [B, T] float32: given, or 1 on every real token."""
  return batch['weights'] if 'weights' in batch else real_tokens(batch)


def real_tokens(batch) -> jax.Array:
  """[B, T] float32: 1 on every token that is not padding; without segments all are real."""
  if 'segment_ids' in batch:
    return (batch['segment_ids'] > 0).astype(jnp.float32)
  return jnp.ones(batch['tokens'].shape, jnp.float32)


def answers(batch, name: str) -> jax.Array:
  """batch[name], int32: what is to be predicted. Raises UserError when the batch has none."""
  if name not in batch:
    raise UserError(f'a loss needs {name!r}, what is to be predicted, but the batch has {sorted(batch)}.')
  return batch[name]


def mean(total, weight):
  """total / weight, and 0 where nothing was weighed (a batch of padding alone)."""
  return total / jnp.maximum(weight, 1)


def logits(x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
  """[B, T, V] in float32, or wider if x is."""
  return param.dot('BTD,VD->BTV', x_BTD, table_VD, preferred_element_type=jnp.promote_types(x_BTD.dtype, jnp.float32))


def summed_loss(x_BTD: jax.Array, table_VD: jax.Array, targets_BT, weights_BT, chunk: int = 0) -> jax.Array:
  """Sum of `token_losses` of the head's logits.

  Args:
    chunk: positions of each row whose logits exist at a time, in the backward pass too; 0: all of them.
  """
  T = x_BTD.shape[1]
  if not 0 < chunk < T:
    return jnp.sum(token_losses(logits(x_BTD, table_VD), targets_BT, weights_BT))
  def split(v):
    v = jnp.pad(v, [(0, 0), (0, -T % chunk)] + [(0, 0)] * (v.ndim - 2))
    return v.reshape(v.shape[0], -1, chunk, *v.shape[2:]).swapaxes(0, 1)
  return _chunked(split(x_BTD), table_VD, split(targets_BT), split(weights_BT))


@jax.custom_vjp
def _chunked(x_NBCD, table_VD, targets_NBC, weights_NBC):
  def add(total, chunk):
    x, targets, w = chunk
    return total + jnp.sum(token_losses(logits(x, table_VD), targets, w)), None
  return jax.lax.scan(add, _zero(x_NBCD, weights_NBC), (x_NBCD, targets_NBC, weights_NBC))[0]


def _zero(x, weights, shape=()):
  """Start of a sum over losses or gradients: float32, or wider if x or the weights are."""
  return jnp.zeros(shape, jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), weights.dtype))


def _chunked_forward(x_NBCD, table_VD, targets_NBC, weights_NBC):
  """The loss and both gradients in one pass: softmax minus one-hot is at hand while the logits are."""
  def add(carry, chunk):
    total, d_table = carry
    x, targets, w = chunk
    losses, pull = jax.vjp(lambda z: token_losses(z, targets, w), logits(x, table_VD))
    d_logits = pull(jnp.ones_like(losses))[0].astype(x.dtype)
    d_table += param.dot('BCV,BCD->VD', d_logits, x, preferred_element_type=d_table.dtype)
    return (total + jnp.sum(losses), d_table), param.dot('BCV,VD->BCD', d_logits, table_VD)
  start = (_zero(x_NBCD, weights_NBC), _zero(x_NBCD, weights_NBC, table_VD.shape))
  (total, d_table), d_x = jax.lax.scan(add, start, (x_NBCD, targets_NBC, weights_NBC))
  return total, (d_x, d_table.astype(table_VD.dtype))


def _chunked_backward(gradients, cotangent):
  d_x, d_table = gradients
  return d_x * cotangent.astype(d_x.dtype), d_table * cotangent.astype(d_table.dtype), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
