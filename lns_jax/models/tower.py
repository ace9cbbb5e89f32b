"""The vision tower of Qwen2.5-VL (arXiv 2502.13923): a family of `lns_jax.models.transformer`.

Rows are images, padded to the longest; segment 0 is padding. A row is a sequence of patches in merge order (the
merge x merge patches of a cell follow each other, cells in rows), each C * frames * P * P numbers (channel, frame, row,
column). Behind the blocks a norm (the final one) and the merger, Linear GELU Linear on the patches of a cell, make one
embedding of each cell. Layers see the windows that 'windows' of a batch numbers, or the whole image, see
`lns_jax.models.grids`.
"""

import flax.linen as nn
import jax

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.layers import param
from lns_jax.models import loss

INPUT = 'patches'  # what a batch calls the model's input, float [B, T, C * frames * P * P]
UNIT = 'images'  # what a score is a mean over


class Embed(nn.Module):
  """Patch projection, without a bias."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self):
    pixels = patch_numbers(self.config)
    param.matrix(self, 'patch', 'embed', 0, (pixels, self.config.d_model), ('patch', 'embed'), pixels)


class Merger(nn.Module):
  """The two matrices that make one embedding of a cell."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self):
    c = self.config
    inner = c.merge ** 2 * c.d_model
    param.matrix(self, 'up', 'head', 0, (inner, inner), ('patch', 'mlp'), inner)
    param.vector(self, 'up_bias', nn.initializers.zeros, (inner,), 'mlp')
    param.matrix(self, 'down', 'head', 0, (inner, c.out_width), ('mlp', 'embed'), inner)
    param.vector(self, 'down_bias', nn.initializers.zeros, (c.out_width,))


def patch_numbers(config: config_lib.ModelConfig) -> int:
  """Numbers of a patch."""
  return config.channels * config.frames * config.patch_size ** 2


def ends(config: config_lib.ModelConfig) -> dict[str, nn.Module]:
  """The modules outside the blocks, norms apart; calling one without arguments declares its parameters."""
  return {'embed': Embed(config), 'head': Merger(config)}


def embed(config: config_lib.ModelConfig, params, patches: jax.Array, segment_ids=None) -> jax.Array:
  """[B, T, numbers] -> [B, T, D] in the compute type.

  Raises UserError for patches of another size, or without what `vl.arrange` says of where they stand.
  """
  if patches.shape[-1] != patch_numbers(config):
    raise UserError(f'patches of {patches.shape[-1]} numbers do not fit a tower whose patches have '
                    f'{config.channels} x {config.frames} x {config.patch_size} x {config.patch_size} = '
                    f'{patch_numbers(config)}.')
  if segment_ids is None:
    raise UserError('a vision tower needs to know where patches stand: segment_ids, coordinates and windows, as '
                    'lns_jax.models.vl.arrange makes them.')
  return param.dot('BTP,PD->BTD', patches.astype(param.dtypes(config)[1]), params['embed']['patch'])


def logits(config: config_lib.ModelConfig, params, normed_BTD: jax.Array) -> jax.Array:
  """The final norm's output -> the embeddings of the cells, [B, T / merge^2, out_width] in the compute type."""
  p, inner = params['head'], config.merge ** 2 * config.d_model
  cells = normed_BTD.reshape(len(normed_BTD), -1, inner)
  hidden = param.dot('BTD,DF->BTF', cells, p['up']) + p['up_bias'].astype(cells.dtype)
  hidden = jax.nn.gelu(hidden, approximate=False)
  return param.dot('BTF,FD->BTD', hidden, p['down']) + p['down_bias'].astype(cells.dtype)


def real_tokens(config: config_lib.ModelConfig, batch) -> jax.Array:
  """[B, T] float32: 1 on every patch that is not padding."""
  return loss.real_tokens({'tokens': batch['patches'][..., 0]} | batch)


def row_losses(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch):
  """Raises UserError: there is nothing that a tower alone predicts."""
  raise UserError('a vision tower predicts nothing by itself: give a score_fn, or measure on the states.')
