"""The vision transformer: what lies before and behind the blocks. A family of `lns_jax.models.transformer`.

Images [B, S, S, C] become T tokens: the patches in rows, each flattened to P * P * C numbers (row, column, channel),
and with model.pooling = cls a learned CLS token before them. The classifier reads the final norm's output of the CLS
token, or its mean over patches (model.pooling = mean, no CLS token).

Starts: matrices and positions by model.init; its plain normal of 0.02 is timm's start, whose truncation at +-2 is
100 standard deviations away. CLS 1e-6 as in timm. The head is drawn like the rest, as timm's default; a head of
zeros (timm's `jax` mode) would give the blocks no gradient in the first update.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.layers import param
from lns_jax.models import loss

INPUT = 'images'  # what a batch calls the model's input, float [B, S, S, C]
UNIT = 'images'  # what a loss is a mean over
CLS_STD = 1e-6


class Embed(nn.Module):
  """Patch projection with a bias, CLS token, learned positions of all tokens."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self):
    c = self.config
    pixels = c.patch_size ** 2 * c.channels
    param.matrix(self, 'patch', 'embed', 0, (pixels, c.d_model), ('patch', 'embed'), pixels)
    param.matrix(self, 'positions', 'embed', 0, (c.num_tokens, c.d_model), ('patch', 'embed'), c.d_model)
    param.vector(self, 'patch_bias', nn.initializers.zeros, (c.d_model,))
    if c.has_cls:
      param.vector(self, 'cls', nn.initializers.normal(CLS_STD), (c.d_model,))


class Head(nn.Module):
  """The classifier: [classes, D] and a bias."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self):
    c = self.config
    param.matrix(self, 'table', 'head', 0, (c.num_classes, c.d_model), ('vocab', 'embed'), c.d_model)
    param.vector(self, 'bias', nn.initializers.zeros, (c.num_classes,), 'vocab')


def ends(config: config_lib.ModelConfig) -> dict[str, nn.Module]:
  """The modules outside the blocks, norms apart; calling one without arguments declares its parameters."""
  return {'embed': Embed(config), 'head': Head(config)}


def patches(config: config_lib.ModelConfig, images: jax.Array) -> jax.Array:
  """[B, S, S, C] -> [B, patches, P * P * C], patches in rows. Raises UserError for images of another shape."""
  S, P, C = config.image_size, config.patch_size, config.channels
  if images.ndim != 4 or images.shape[1:] != (S, S, C):
    raise UserError(f'images must be of shape [B, {S}, {S}, {C}] as model.image_size and model.channels say, '
                    f'got {list(images.shape)}.')
  x = images.reshape(-1, S // P, P, S // P, P, C).swapaxes(2, 3)
  return x.reshape(-1, (S // P) ** 2, P * P * C)


def embed(config: config_lib.ModelConfig, params, images: jax.Array, segment_ids=None) -> jax.Array:
  """[B, S, S, C] -> [B, T, D] in the compute type. Raises UserError for images of another shape, or in segments."""
  if segment_ids is not None:
    raise UserError('segment_ids divide rows of text; a model of family vit takes none.')
  p, dtype = params['embed'], param.dtypes(config)[1]
  x_BTD = param.dot('BTP,PD->BTD', patches(config, images).astype(dtype), p['patch']) + p['patch_bias'].astype(dtype)
  if config.has_cls:
    cls = jnp.broadcast_to(p['cls'].astype(dtype), (len(x_BTD), 1, config.d_model))
    x_BTD = jnp.concatenate([cls, x_BTD], axis=1)
  return x_BTD + p['positions'].astype(dtype)


def logits(config: config_lib.ModelConfig, params, normed_BTD: jax.Array) -> jax.Array:
  """The final norm's output -> [B, classes], float32 or wider."""
  pooled_BD = normed_BTD[:, 0] if config.has_cls else jnp.mean(normed_BTD, axis=1)
  scores = loss.logits(pooled_BD[:, None], params['head']['table'])[:, 0]
  return scores + params['head']['bias'].astype(scores.dtype)


def weights(batch) -> jax.Array:
  """[B] float32: what each image counts, 1 where the batch does not say; 0 is padding."""
  return batch['weights'] if 'weights' in batch else jnp.ones(len(batch['images']), jnp.float32)


def real_tokens(config: config_lib.ModelConfig, batch) -> jax.Array:
  """[B, T] float32: 1 on every token of an image that is not padding."""
  return jnp.repeat((weights(batch) > 0).astype(jnp.float32)[:, None], config.num_tokens, axis=1)


def row_losses(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch) -> tuple[jax.Array, jax.Array]:
  """(cross-entropy of each image times its weight [B], its weight [B]); batch: with 'labels' [B]."""
  w_B = weights(batch)
  return loss.token_losses(logits(config, params, normed_BTD), loss.answers(batch, 'labels'), w_B), w_B


def summed_loss(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch, chunk: int = 0):
  """(summed loss, weight) of a batch. chunk: of no use, there is one set of logits an image."""
  losses_B, w_B = row_losses(config, params, normed_BTD, batch)
  return jnp.sum(losses_B), jnp.sum(w_B)


def scores(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch) -> dict[str, jax.Array]:
  """Sums of an evaluation besides the loss: 'correct', the weight of images whose highest logit is their label."""
  right = jnp.argmax(logits(config, params, normed_BTD), axis=-1) == loss.answers(batch, 'labels')
  return {'correct': jnp.sum(right * weights(batch))}


def row_shapes(config: config_lib.ModelConfig, T: int) -> dict[str, jax.ShapeDtypeStruct]:
  """What a row of training consists of: an image, its class, its weight."""
  S, C = config.image_size, config.channels
  return {'images': jax.ShapeDtypeStruct((S, S, C), jnp.float32), 'labels': jax.ShapeDtypeStruct((), jnp.int32),
          'weights': jax.ShapeDtypeStruct((), jnp.float32)}
