"""The MLP: SwiGLU, or a plain GELU."""

import flax.linen as nn
import jax

from lns_jax import config as config_lib
from lns_jax.layers import param


class MLP(nn.Module):
  """f of the MLP sub-layer: W_down (silu(W_gate x) * W_up x), or W_down gelu(W_up x), exact (erf) or by tanh."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, layer: int) -> jax.Array:
    """layer: 1-based index, for depth-dependent initialisation. Returns [B, T, D]."""
    c, D, F = self.config, self.config.d_model, self.config.d_ff
    names = ('gate', 'up') if self.config.mlp == 'swiglu' else ('up',)
    into = {n: param.matrix(self, n, 'mlp_in', layer, (D, F), ('embed', 'mlp'), D) for n in names}
    down = param.matrix(self, 'down', 'out', layer, (F, D), ('mlp', 'embed'), F)
    hidden = {n: param.biased(self, n, param.product(c, 'BTD,DF->BTF', x_BTD, w), 'mlp') for n, w in into.items()}
    if 'gate' in hidden:
      hidden_BTF = jax.nn.silu(hidden['gate']) * hidden['up']
    else:
      hidden_BTF = jax.nn.gelu(hidden['up'], approximate=self.config.mlp == 'gelu_tanh')
    return param.biased(self, 'down', param.product(c, 'BTF,FD->BTD', hidden_BTF, down), 'norm')
