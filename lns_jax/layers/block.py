"""The block: the one equation of `lns_jax.layers.schemes`, once for attention and once for the MLP."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.layers import param, schemes
from lns_jax.layers.attention import Attention, Context
from lns_jax.layers.mlp import MLP
from lns_jax.layers.norms import Norm, times, wide


class Block(nn.Module):
  """One layer: x -> (x, out), where `out` holds every intermediate as an ordinary output.

  `out` has, for sub in attn, mlp: '{sub}_x' the stream that enters the sub-layer, '{sub}_in' what f
  reads, '{sub}_out' what f returns, '{sub}_branch' what is added, '{sub}_skip' what it is added to (a x);
  and 'out', the stream that leaves the block. All are [B, T, D]; jit removes those that nobody reads.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, ctx: Context, layer: int, override: dict[str, schemes.Factors] | None = None,
               subs: tuple[str, ...] = schemes.SUBLAYERS):
    """Applies layer `layer` (1-based).

    Args:
      x_BTD: residual stream.
      ctx: rotary tables and segments.
      layer: a Python int when traced, so that its factors are literals of the program.
      override: factors to use instead, as fp32 scalars: the scanned loop's, whose index is not static.
      subs: the sub-layers to apply; past another one the stream goes on as it is, without its norms and factors.

    Raises:
      UserError: when `layer` is a tracer or an array.
    """
    if type(layer) is not int:
      raise UserError(f'the layer index must be a Python int when the block is traced, got {type(layer).__name__}: '
                      'pass it as a static argument (static_argnums of jit and remat).')
    c, out = self.config, {}
    row, constants = schemes.row(c, layer), override or schemes.factors(c, layer)
    attention, mlp = Attention(c, name='attn'), MLP(c, name='mlp')
    gate = param.factor(self, schemes.GATE, 0.0) if isinstance(row.post, schemes.Gate) else None
    for sub, f in (('attn', lambda h: attention(h, ctx, layer)), ('mlp', lambda h: mlp(h, layer))):
      if sub not in subs:
        continue
      at = schemes.site(c, layer, sub)
      k = self.factors(row, constants[sub], sub, at, ctx)
      gain = param.start(self, lambda l, at=at: row.in_gain(at._replace(l=l)), layer)
      x_BTD = self.sublayer(sub, f, x_BTD, row, k, gain, out)
      x_BTD = times(x_BTD, k.post) if gate is None else gated(x_BTD, gate)
    out['out'] = x_BTD
    return x_BTD, out

  def factors(self, row: schemes.Row, constants: schemes.Factors, sub: str, at: schemes.Site, ctx: Context):
    """The factors of a sub-layer: their constants, times what is learned or grows with the step."""
    def value(name):
      entry, constant = getattr(row, name), getattr(constants, name)
      if isinstance(entry, schemes.Learned):
        shape = (self.config.d_model,) if entry.per_channel else ()
        start = param.start(self, lambda l: entry.start(at._replace(l=l)), at.l, jnp.float32)
        return constant * param.factor(self, f'{sub}_{name}', start, shape)
      if isinstance(entry, schemes.Ramp):
        return 1.0 if ctx.step is None else jnp.minimum(ctx.step * constant, 1.0)
      return constant
    return schemes.Factors(*map(value, schemes.FACTORS))

  def sublayer(self, name: str, f: Callable, x: jax.Array, row: schemes.Row, k: schemes.Factors, in_gain: float,
               out: dict):
    """out_norm(a * x + b * res_norm(f(s * in_norm(c * x)))); the caller applies `post`."""
    norm = lambda kind, **kwargs: Norm(self.config, name=f'{name}_{kind}_norm', **kwargs)
    groups = (self.config.norm_groups or self.config.num_heads) if row.in_groups else 1
    h = times(x, k.c)
    h = norm('in', groups=groups, start=in_gain)(h, k.s) if row.in_norm else times(h, k.s)
    y = f(h)
    branch = times(norm('res')(y) if row.res_norm else y, k.b)
    skip = times(x, k.a)
    out.update({f'{name}_x': x, f'{name}_in': h, f'{name}_out': y, f'{name}_branch': branch, f'{name}_skip': skip})
    x = skip + branch
    return norm('out')(x) if row.out_norm else x


def gated(x: jax.Array, gate: jax.Array) -> jax.Array:
  """x - SiLU(gate) * stop_gradient(x): smaller in the forward pass, whole in the backward pass (GPAS)."""
  x_wide = x.astype(wide(x))
  return (x_wide - jax.nn.silu(gate) * jax.lax.stop_gradient(x_wide)).astype(x.dtype)
