"""Every loss term is (sum, weight); whoever reports or differentiates divides once."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lns_jax import mesh
from lns_jax.errors import UserError
from lns_jax.layers import param

# Those that split the positions of a row: behind a pipeline its stages, which all have the stream, share the head.
ALONG = ('sequence', 'stage')
TOKEN_AXES = (*mesh.ROWS, *ALONG)  # those that split tokens
# What a device has of tokens and table, and what all have alike.
TOKENS, TABLE, WHOLE = PartitionSpec(mesh.ROWS, ALONG), PartitionSpec('tensor', 'fsdp'), PartitionSpec()


def token_losses(logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, over: str = '') -> jax.Array:
  """weight * -log p(target) in nats, [B, T], or [N] of logits [N, V].

  Where the weight is 0 the target is not read: an ignore label such as -100 there yields neither a
  NaN nor the last class. A weighed target outside of the vocabulary is NaN, which stops a run.

  over: inside of shard_map, the mesh axis that the vocabulary is split over.
  """
  V = logits_BTV.shape[-1]
  first, everything = (jax.lax.axis_index(over) * V, jax.lax.axis_size(over) * V) if over else (0, V)
  targets_BT = jnp.where(weights_BT > 0, targets_BT, 0)
  outside = outside_vocabulary(targets_BT, everything)
  normaliser = jax.nn.logsumexp(logits_BTV, axis=-1)
  # A comparison instead of a look-up, whose gradient is a scatter into zeros of the size of the logits.
  chosen = jnp.sum(jnp.where(first + jnp.arange(V) == targets_BT[..., None], logits_BTV, 0), axis=-1)
  if over:
    top = jax.lax.pmax(jax.lax.stop_gradient(normaliser), over)
    normaliser = top + jnp.log(jax.lax.psum(jnp.exp(normaliser - top), over))
    chosen = jax.lax.psum(chosen, over)
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
  """[..., V] of x [..., D], in float32, or wider if x is."""
  return param.dot('...D,VD->...V', x_BTD, table_VD, preferred_element_type=jnp.promote_types(x_BTD.dtype, jnp.float32))


def summed_loss(x_BTD: jax.Array, table_VD: jax.Array, targets_BT, weights_BT, chunk: int = 0) -> jax.Array:
  """Sum of `token_losses` of the head's logits.

  In chunks on a mesh, every device takes its own tokens and sums its own gradient of the table, which is gathered once
  before and reduced once after.

  Args:
    chunk: positions of each row whose logits exist at a time, in the backward pass too; 0: all of them; -1: as many as
      suit the platform.
  """
  B, T, _ = x_BTD.shape
  rows, along = (math.prod(map(mesh.size, axes)) for axes in (mesh.ROWS, ALONG))
  meshed = rows * along > 1 and B % rows == 0
  if meshed:
    x_BTD, targets_BT, weights_BT = (_filled(v, along) for v in (x_BTD, targets_BT, weights_BT))
    B, T = B // rows, -(-T // along)
  positions = min(T, chunk if chunk >= 0 else _positions(B, table_VD.shape[0]))
  if not positions or positions == T and not meshed:
    return jnp.sum(token_losses(logits(x_BTD, table_VD), targets_BT, weights_BT))
  return _chunked(meshed, -(-T // positions), x_BTD, table_VD, targets_BT, weights_BT)


def _filled(v, parts: int):
  """v [B, T, ...] with zeros behind it, so that T divides over so many parts."""
  short = -v.shape[1] % parts
  return jnp.pad(v, [(0, 0), (0, short)] + [(0, 0)] * (v.ndim - 2)) if short else v


def _positions(B: int, V: int) -> int:
  """Positions of each of a device's B rows whose logits exist at a time.

  A CPU was fastest with 32. Elsewhere each chunk reads the table and adds to its gradient: 6 n V D operations for about
  12 V D bytes of n tokens, so that a chunk of a thousand tokens is beyond what the memory of a TPU holds up (240
  operations a byte on v5e, 560 on v6e). As many as fill 512 MiB with float32 logits, and 1,024 tokens at least.
  """
  if mesh.platform() == 'cpu':
    return 32
  return -(-max(1024, 2**27 * mesh.size('tensor') // V) // B)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(meshed: bool, chunks: int, x_BTD, table_VD, targets_BT, weights_BT):
  def total(x_BTD, table_VD, targets_BT, weights_BT):
    table_VD = _gathered(meshed, table_VD, x_BTD.dtype)
    def add(total, chunk):
      x_ND, targets_N, w_N = chunk
      return total + jnp.sum(token_losses(logits(x_ND, table_VD), targets_N, w_N, _vocabulary(meshed))), None
    start = _zeros((), x_BTD, weights_BT, TOKEN_AXES * meshed)
    total, _ = jax.lax.scan(add, start, _split(chunks, x_BTD, targets_BT, weights_BT))
    return jax.lax.psum(total, TOKEN_AXES) if meshed else total
  return _on_each_device(meshed, total, WHOLE)(x_BTD, table_VD, targets_BT, weights_BT)


def _on_each_device(meshed: bool, f, out_specs):
  """f of a device's tokens and its part of the table; f itself where no mesh splits tokens."""
  if not meshed:
    return f
  manual = {*TOKEN_AXES, 'tensor'}
  return jax.shard_map(f, in_specs=(TOKENS, TABLE, TOKENS, TOKENS), out_specs=out_specs, axis_names=manual)


def _vocabulary(meshed: bool) -> str:
  return 'tensor' if meshed else ''


def _gathered(meshed: bool, table_VD, dtype):
  """The table over all D, in the type of the products."""
  table_VD = param.dense(table_VD).astype(dtype)
  return jax.lax.all_gather(table_VD, 'fsdp', axis=1, tiled=True) if meshed else table_VD


def _split(chunks: int, *arrays):
  """[B, T, ...] -> equal chunks [chunks, N, ...] of tokens in their order, the last one filled up with zeros."""
  def split(v):
    v = v.reshape(-1, *v.shape[2:])
    return jnp.pad(v, [(0, -len(v) % chunks)] + [(0, 0)] * (v.ndim - 1)).reshape(chunks, -1, *v.shape[1:])
  return tuple(map(split, arrays))


def _zeros(shape, x, weights, differ: tuple[str, ...]):
  """Start of a sum over losses or gradients: float32, or wider if x or the weights are.

  differ: mesh axes along which the devices' sums do.
  """
  zeros = jnp.zeros(shape, jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), weights.dtype))
  return jax.lax.pcast(zeros, differ, to='varying') if differ else zeros


def _chunked_forward(meshed: bool, chunks: int, x_BTD, table_VD, targets_BT, weights_BT):
  """The loss and both gradients in one pass: softmax minus one-hot is at hand while the logits are."""
  # The table's gradient is summed as it is sent; where it is not, as a CPU is faster (by a fifth at V 8192, D 256).
  order = 'VD' if meshed else 'DV'
  def gradients(x_BTD, table_VD, targets_BT, weights_BT):
    table_VD = _gathered(meshed, table_VD, x_BTD.dtype)
    def add(carry, chunk):
      total, d_table = carry
      x_ND, targets_N, w_N = chunk
      losses, pull = jax.vjp(lambda z: token_losses(z, targets_N, w_N, _vocabulary(meshed)), logits(x_ND, table_VD))
      d_logits_NV = pull(jnp.ones_like(losses))[0].astype(x_ND.dtype)
      d_table += param.dot(f'ND,NV->{order}', x_ND, d_logits_NV, preferred_element_type=d_table.dtype)
      return (total + jnp.sum(losses), d_table), param.dot('NV,VD->ND', d_logits_NV, table_VD)
    start = (_zeros((), x_BTD, weights_BT, TOKEN_AXES * meshed),
             _zeros(table_VD.shape[::1 if meshed else -1], x_BTD, weights_BT, (*TOKEN_AXES, 'tensor') * meshed))
    (total, d_table), d_x = jax.lax.scan(add, start, _split(chunks, x_BTD, targets_BT, weights_BT))
    d_x_BTD = d_x.reshape(-1, x_BTD.shape[-1])[:targets_BT.size].reshape(x_BTD.shape)
    if meshed:
      total, d_x_BTD = jax.lax.psum(total, TOKEN_AXES), jax.lax.psum(d_x_BTD, 'tensor')
      # In the type of the products, as the blocks' gradients are reduced: half the bytes.
      d_table = jax.lax.psum_scatter(d_table.astype(x_BTD.dtype), 'fsdp', scatter_dimension=1, tiled=True)
      d_table = jax.lax.psum(d_table, ('data', *ALONG))
    return total, d_x_BTD, (d_table if meshed else d_table.T).astype(table_type)
  table_type = table_VD.dtype
  mapped = _on_each_device(meshed, gradients, (WHOLE, TOKENS, TABLE))
  total, *both = mapped(x_BTD, table_VD, targets_BT, weights_BT)
  if meshed:  # before the blocks' backward pass, or each device holds its own sum for the whole table to the end of it
    both = jax.lax.optimization_barrier(both)
  return total, both


def _chunked_backward(meshed: bool, chunks: int, both, cotangent):
  d_x_BTD, d_table_VD = both
  return d_x_BTD * cotangent.astype(d_x_BTD.dtype), d_table_VD * cotangent.astype(d_table_VD.dtype), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
