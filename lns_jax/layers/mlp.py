"""The SwiGLU MLP."""

import flax.linen as nn
import jax

from lns_jax import config as config_lib
from lns_jax.layers import param


class MLP(nn.Module):
  """f of the MLP sub-layer: W_down (silu(W_gate x) * W_up x)."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, layer: int) -> jax.Array:
    """layer: 1-based index, for depth-dependent initialisation. Returns [B, T, D]."""
    D, F = self.config.d_model, self.config.d_ff
    gate = param.matrix(self, 'gate', 'mlp_in', layer, (D, F), ('embed', 'mlp'), D)
    up = param.matrix(self, 'up', 'mlp_in', layer, (D, F), ('embed', 'mlp'), D)
    down = param.matrix(self, 'down', 'out', layer, (F, D), ('mlp', 'embed'), F)
    hidden_BTF = jax.nn.silu(param.dot('BTD,DF->BTF', x_BTD, gate)) * param.dot('BTD,DF->BTF', x_BTD, up)
    return param.dot('BTF,FD->BTD', hidden_BTF, down)
