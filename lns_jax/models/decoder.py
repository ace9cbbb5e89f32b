"""The Llama family and GPT-2: what lies before and behind the blocks. A family of `lns_jax.models.transformer`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lns_jax import config as config_lib
from lns_jax import mesh
from lns_jax.errors import UserError
from lns_jax.layers import attention, param
from lns_jax.models import loss

INPUT = 'tokens'  # what a batch calls the model's input, int32 [B, T]
UNIT = 'tokens'  # what a loss is a mean over


class Table(nn.Module):
  """A [V, D] matrix: the embedding, and the untied head."""

  config: config_lib.ModelConfig
  role: str

  @nn.compact
  def __call__(self) -> jax.Array:
    c = self.config
    return param.matrix(self, 'table', self.role, 0, (c.vocab_size, c.d_model), ('vocab', 'embed'), c.d_model)


class Positions(nn.Module):
  """A [P, D] matrix of learned positions."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self) -> jax.Array:
    c = self.config
    return param.matrix(self, 'table', 'embed', 0, (c.max_positions, c.d_model), ('patch', 'embed'), c.d_model)


def ends(config: config_lib.ModelConfig) -> dict[str, nn.Module]:
  """The modules outside the blocks, norms apart; calling one without arguments declares its parameters."""
  return ({'embed': Table(config, 'embed')} | ({} if config.tie_embeddings else {'head': Table(config, 'head')})
          | ({'positions': Positions(config)} if config.positions == 'learned' else {}))


def embed(config: config_lib.ModelConfig, params, tokens_BT: jax.Array, segment_ids_BT=None, past=None) -> jax.Array:
  """[B, T] -> [B, T, D] in the compute type. Raises UserError for more positions than are learned.

  tokens_BT: ids; or rows of the table themselves, floats [B, T, D], among which those of images may stand.
  past: of rows whose beginning is cached, an `attention.Past`; whoever has one knows how long they may grow.
  """
  dtype, T = param.dtypes(config)[1], tokens_BT.shape[1]
  given = jnp.issubdtype(tokens_BT.dtype, jnp.floating)
  x_BTD = (tokens_BT if given else params['embed']['table'][tokens_BT]).astype(dtype)
  if not given:  # as the table lies: exchanged behind the cast, tokens and their gradients are half the bytes
    x_BTD = mesh.constrain(x_BTD, ('looked_up', 'seq', 'embed'))
  if config.positions != 'learned':
    return x_BTD
  if past is None and T > config.max_positions:
    raise UserError(f'rows of {T} tokens are longer than the {config.max_positions} positions that the model has '
                    'learned (model.max_positions).')
  return x_BTD + params['positions']['table'][attention.positions(T, segment_ids_BT, past)].astype(dtype)


def head_table(config: config_lib.ModelConfig, params) -> jax.Array:
  """[V, D]."""
  return params['embed' if config.tie_embeddings else 'head']['table']


def logits(config: config_lib.ModelConfig, params, normed_BTD: jax.Array) -> jax.Array:
  """The final norm's output -> [B, T, V], float32 or wider."""
  return loss.logits(normed_BTD, head_table(config, params))


def weights(batch) -> jax.Array:
  """[B, T] float32: what each target counts in the loss: as given, or 1 on every real token."""
  return loss.weights(batch)


def real_tokens(config: config_lib.ModelConfig, batch) -> jax.Array:
  """[B, T] float32: 1 on every token that is not padding."""
  return loss.real_tokens(batch)


def row_losses(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch) -> tuple[jax.Array, jax.Array]:
  """(summed loss of each row [B], its weight [B]); batch: with 'targets' [B, T]."""
  w_BT = loss.weights(batch)
  losses_BT = loss.token_losses(logits(config, params, normed_BTD), loss.answers(batch, 'targets'), w_BT)
  return jnp.sum(losses_BT, axis=-1), jnp.sum(w_BT, axis=-1)


def summed_loss(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch, chunk: int = 0):
  """(summed loss, weight) of a batch. chunk: positions whose logits exist at a time, see `loss.summed_loss`."""
  w_BT = loss.weights(batch)
  total = loss.summed_loss(normed_BTD, head_table(config, params), loss.answers(batch, 'targets'), w_BT, chunk)
  return total, jnp.sum(w_BT)


def scores(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch) -> dict[str, jax.Array]:
  """Sums of an evaluation besides the loss: 'bytes' of text that the weighed targets stand for; batch: with 'bytes'."""
  return {'bytes': jnp.sum(batch['bytes'] * loss.weights(batch))}


def row_shapes(config: config_lib.ModelConfig, T: int) -> dict[str, jax.ShapeDtypeStruct]:
  """What a row of training consists of."""
  return {name: jax.ShapeDtypeStruct((T,), jnp.int32) for name in ('tokens', 'targets', 'segment_ids')}
