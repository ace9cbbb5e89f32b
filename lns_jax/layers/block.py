"""The block: the one equation of `lns_jax.layers.schemes`, once for attention and once for the MLP."""

from collections.abc import Callable

import flax.linen as nn
import jax

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.layers import schemes
from lns_jax.layers.attention import Attention, Context
from lns_jax.layers.mlp import MLP
from lns_jax.layers.norms import RMSNorm, times

SUBLAYERS = ('attn', 'mlp')


def row(config: config_lib.ModelConfig, layer: int) -> schemes.Row:
  """The row of the scheme table that a layer of this model obeys."""
  return schemes.row(config.scheme, layer, config.depth, config.mix_fraction)


def factors(config: config_lib.ModelConfig, layer: int) -> dict[str, schemes.Factors]:
  """Factors of both sub-layers of a layer, as Python floats."""
  r = row(config, layer)
  exponents = {'attn': config.p_attn, 'mlp': config.p_mlp}
  return {sub: schemes.factors(r, layer, config.depth, exponents[sub]) for sub in SUBLAYERS}


class Block(nn.Module):
  """One layer: x -> (x, out), where `out` holds every intermediate as an ordinary output.

  `out` has, for sub in attn, mlp: '{sub}_x' the stream that enters the sub-layer, '{sub}_in' what f
  reads, '{sub}_out' what f returns, '{sub}_branch' what is added to the stream; and 'out', the stream
  that leaves the block. All are [B, T, D]; jit removes those that nobody reads.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, ctx: Context, layer: int, override: dict[str, schemes.Factors] | None = None):
    """Applies layer `layer` (1-based).

    Args:
      x_BTD: residual stream.
      ctx: rotary tables and segments.
      layer: a Python int when traced, so that its factors are literals of the program.
      override: factors to use instead, as fp32 scalars: the scanned loop's, whose index is not static.

    Raises:
      UserError: when `layer` is a tracer or an array.
    """
    if type(layer) is not int:
      raise UserError(f'the layer index must be a Python int when the block is traced, got {type(layer).__name__}: '
                      'pass it as a static argument (static_argnums of jit and remat).')
    c = self.config
    k = override or factors(c, layer)
    out = {}
    attention, mlp = Attention(c, name='attn'), MLP(c, name='mlp')
    x_BTD = self.sublayer('attn', lambda h: attention(h, ctx, layer), x_BTD, row(c, layer), k['attn'], out)
    x_BTD = self.sublayer('mlp', lambda h: mlp(h, layer), x_BTD, row(c, layer), k['mlp'], out)
    out['out'] = x_BTD
    return x_BTD, out

  def sublayer(self, name: str, f: Callable, x: jax.Array, r: schemes.Row, k: schemes.Factors, out: dict):
    """y = post * out_norm(a * x + b * res_norm(f(s * in_norm(c * x))))."""
    norm = lambda kind: RMSNorm(self.config, name=f'{name}_{kind}_norm')
    h = times(x, k.c)
    h = norm('in')(h, k.s) if r.in_norm else times(h, k.s)
    y = f(h)
    branch = times(norm('res')(y) if r.res_norm else y, k.b)
    out.update({f'{name}_x': x, f'{name}_in': h, f'{name}_out': y, f'{name}_branch': branch})
    x = times(x, k.a) + branch
    if r.out_norm:
      x = norm('out')(x)
    return times(x, k.post)
