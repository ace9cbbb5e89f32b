"""RMSNorm, LayerNorm and dynamic tanh, with the scheme's factor folded into the gain."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lns_jax import config as config_lib
from lns_jax.layers import param


def wide(x: jax.Array) -> jnp.dtype:
  """The type in which statistics, gains and factors are multiplied: float32, or wider if x is."""
  return jnp.promote_types(x.dtype, jnp.float32)


def times(x: jax.Array, factor) -> jax.Array:
  """x * factor, rounded once: in bf16 the factor 1/sqrt(l) alone would be wrong by up to 0.25 %."""
  if isinstance(factor, float) and factor == 1.0:
    return x
  return (x.astype(wide(x)) * factor).astype(x.dtype)


class Norm(nn.Module):
  """The norm that `model.norm` names; the factor goes on its whole output.

  rmsnorm: x / rms(x) * gain. layernorm: (x - mean) / std * gain + bias. nonparametric_layernorm: without either
  (OLMo 1). dyt: tanh(alpha x) * gain + bias, no statistics (arXiv 2503.10622). Statistics, gain and factor are in
  float32, followed by one cast to the type of x (paper eq. 12). On a gain the factor costs D multiplications,
  whatever B and T are.

  Attributes:
    groups: the statistics are taken over this many equal groups of channels.
    start: where the gain starts.
  """

  config: config_lib.ModelConfig
  groups: int = 1
  start: float = 1.0

  @nn.compact
  def __call__(self, x: jax.Array, factor=1.0) -> jax.Array:
    """x: [..., D]. factor: Python float, or an fp32 scalar. Returns the shape and type of x."""
    kind, dtype = self.config.norm, wide(x)
    def vector(name, start, shape=x.shape[-1:]):
      return param.vector(self, name, nn.initializers.constant(start), shape).astype(dtype)
    if kind == 'nonparametric_layernorm':
      return standardise(x.astype(dtype), True, self.groups, self.config.norm_eps, factor).astype(x.dtype)
    if kind == 'dyt':
      y = jnp.tanh(vector('alpha', self.config.dyt_alpha, ()) * x)
    else:
      y = standardise(x.astype(dtype), kind == 'layernorm', self.groups, self.config.norm_eps)
    y = y * times(vector('gain', self.start), factor)
    if kind != 'rmsnorm':
      y = y + times(vector('bias', 0.0), factor)
    return y.astype(x.dtype)


def scaled(params: dict, factors_L: jax.Array) -> dict:
  """Parameters of a `Norm` with a gain, stacked over L layers, that need no factor any more: each layer's is in them."""
  times_own = lambda v: v.astype(wide(v)) * factors_L[:, None]
  return params | {name: times_own(v) for name, v in params.items() if name in ('gain', 'bias')}


def standardise(x: jax.Array, centre: bool, groups: int, eps: float, factor=1.0) -> jax.Array:
  """x [..., D] over its root mean square, times a factor, each of `groups` equal parts of D for itself.

  centre: the mean is taken off first, so that a large one does not cancel in the square.
  """
  shape = x.shape
  if groups > 1:
    x = x.reshape(*shape[:-1], groups, -1)
  if centre:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
  scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  return (x * times(scale, factor)).reshape(shape)
