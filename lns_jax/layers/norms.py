"""RMSNorm with the scheme's factor folded into its gain."""

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


class RMSNorm(nn.Module):
  """x / rms(x) * (gain * factor): the factor costs D multiplications, whatever B and T are.

  Statistics, gain and factor are in float32, followed by one cast to the type of x (paper eq. 12).
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array, factor=1.0) -> jax.Array:
    """x: [..., D]. factor: Python float, or an fp32 scalar inside a scan. Returns the shape and type of x."""
    ones = nn.with_logical_partitioning(nn.initializers.ones, ('norm',))
    gain = self.param('gain', ones, (x.shape[-1],), param.dtypes(self.config)[0])
    x_wide = x.astype(wide(x))
    rms = jax.lax.rsqrt(jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True) + self.config.norm_eps)
    return (x_wide * rms * times(gain.astype(x_wide.dtype), factor)).astype(x.dtype)
