"""Products of the blocks' matrices in 8-bit floats: `model.matmul = fp8`.

Operands are e4m3 (3 bits of mantissa, up to 448), gradients that come in e5m2 (2 bits, a wider range), each with
float32 scales from its own largest entries, one for each index that is not summed over: a token's numbers depend on no
other token, so that causality and caches hold and a loss does not depend on the rest of the batch. Sums are float32.
The 8-bit operands of the forward product are those of the backward ones, as in qwix's own training rule, whose
interception of Flax modules is not used: it would reach the products of attention too.
"""

import functools
import re

import jax
import jax.numpy as jnp

from lns_jax.errors import UserError

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def _qwix():
  try:
    import qwix  # not at the top: it takes a second
  except ImportError:
    raise UserError("model.matmul = fp8 needs the package qwix: pip install 'lns_jax[quant]'.") from None
  return qwix


def check(device: jax.Device):
  """Raises UserError where 8-bit floats are not to be had: by the chip (a CPU emulates them), or for want of qwix."""
  _qwix()
  has = {'tpu': lambda: not re.match('TPU v[2-6]', device.device_kind),
         'gpu': lambda: float(device.compute_capability) >= 8.9}.get(device.platform, lambda: True)()
  if not has:
    raise UserError(f'model.matmul = fp8 is not supported on {device.device_kind}, which has no 8-bit floats (TPU v7, '
                    'NVIDIA Ada, H100 and newer have); model.matmul = plain is.')


def _to_8_bits(x: jax.Array, axes: str, kept: str, dtype):
  """x as `qwix.QArray` with a float32 scale, largest |entry| / largest number, for each index of the axes kept."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  channels = [i for i, axis in enumerate(axes) if axis in kept]
  return _qwix().quantize(x.astype(wide), dtype, channelwise_axes=channels)


def _scaled(g: jax.Array, axes: str, scale: jax.Array, scale_axes: str) -> jax.Array:
  """g times the scale of an operand, which has 1 in place of the axes that g lacks and the others in g's order."""
  sizes = {axis: n for axis, n in zip(scale_axes, scale.shape) if axis in axes}
  return g.astype(scale.dtype) * scale.reshape([sizes.get(axis, 1) for axis in axes])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
  """The einsum of tokens x and a matrix w, such as 'BTD,DF->BTF', in 8 bits; the type of x.

  Every axis of the result is one of x or of w alone, in their order. w: float32, not rounded to the type of x before.
  """
  return _forward(equation, x, w)[0]


def _forward(equation: str, x: jax.Array, w: jax.Array):
  x_axes, w_axes, y_axes = re.split(',|->', equation)
  x8, w8 = _to_8_bits(x, x_axes, y_axes, FORWARD), _to_8_bits(w, w_axes, y_axes, FORWARD)
  y = _qwix().einsum(equation, x8, w8, preferred_element_type=x8.scale.dtype)
  return y.astype(x.dtype), (x8, w8, jnp.zeros((), w.dtype))


def _backward(equation: str, kept, g: jax.Array):
  """The scales of an operand lie along what is summed over now, so that g takes them over before it is rounded."""
  x8, w8, w_like = kept
  x_axes, w_axes, y_axes = re.split(',|->', equation)
  def product(into: str, other, other_axes: str, dtype):
    g8 = _to_8_bits(_scaled(g, y_axes, other.scale, other_axes), y_axes, into, BACKWARD)
    return _qwix().einsum(
        f'{y_axes},{other_axes}->{into}', g8, other.qvalue, preferred_element_type=g8.scale.dtype).astype(dtype)
  return product(x_axes, w8, w_axes, g.dtype), product(w_axes, x8, x_axes, w_like.dtype)


einsum.defvjp(_forward, _backward)
