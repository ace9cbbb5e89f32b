"""BERT: what lies before and behind the blocks of an encoder of text. A family of `lns_jax.models.transformer`.

Before: the sum of three embeddings, of the token, of its position in its segment and of its type, through `embed_norm`.
Behind, as model.head says: mlm, a dense layer, the exact GELU, a norm, and a decoder [V, D] with a bias, which is the
embedding where model.tie_embeddings; squad, a start and an end logit at each position; none: states alone. Where the
blocks end with a norm of their own (scheme post: BERT) there is no final norm, see `ModelConfig.has_final_norm`.
"""

import typing

import flax.linen as nn
import jax
import jax.numpy as jnp

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.layers import attention, param
from lns_jax.layers.norms import Norm
from lns_jax.models import loss

INPUT = 'tokens'  # what a batch calls the model's input, int32 [B, T]
UNIT = 'tokens'  # what a loss is a mean over
IGNORED = -100  # a target that is none, as torch and transformers have it


class Typed(typing.NamedTuple):
  """Tokens that are not all of type 0."""

  tokens_BT: jax.Array
  types_BT: jax.Array


class Embed(nn.Module):
  """The three tables of embeddings."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self):
    c, D = self.config, self.config.d_model
    param.matrix(self, 'table', 'embed', 0, (c.vocab_size, D), ('vocab', 'embed'), D)
    param.matrix(self, 'positions', 'embed', 0, (c.max_positions, D), ('position', 'embed'), D)
    param.matrix(self, 'types', 'embed', 0, (c.type_vocab_size, D), ('position', 'embed'), D)


class MaskedHead(nn.Module):
  """Head of masked language modelling: a token at each position."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self):
    c, D = self.config, self.config.d_model
    param.matrix(self, 'dense', 'head', 0, (D, D), ('embed', 'stream'), D)
    param.vector(self, 'dense_bias', nn.initializers.zeros, (D,))
    Norm(c, name='norm')(jnp.zeros((1, 1, D), param.dtypes(c)[1]))
    param.vector(self, 'bias', nn.initializers.zeros, (c.vocab_size,), 'vocab')
    if not c.tie_embeddings:
      param.matrix(self, 'table', 'head', 0, (c.vocab_size, D), ('vocab', 'embed'), D)


class SpanHead(nn.Module):
  """Head of extractive question answering: a start and an end logit at each position."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self):
    D = self.config.d_model
    param.matrix(self, 'span', 'head', 0, (2, D), ('span', 'embed'), D)
    param.vector(self, 'span_bias', nn.initializers.zeros, (2,))


HEADS = {'mlm': MaskedHead, 'squad': SpanHead}


def ends(config: config_lib.ModelConfig) -> dict[str, nn.Module]:
  """The modules outside the blocks, norms apart; calling one without arguments declares its parameters."""
  return {'embed': Embed(config)} | ({'head': HEADS[config.head](config)} if config.head in HEADS else {})


def embed(config: config_lib.ModelConfig, params, tokens: jax.Array | Typed, segment_ids_BT=None) -> jax.Array:
  """[B, T] -> [B, T, D] in the compute type, before `embed_norm`; a type that the model does not have is NaN.

  Raises UserError for rows with more positions than the model has.
  """
  tokens_BT, types_BT = tokens if isinstance(tokens, Typed) else (tokens, jnp.zeros_like(tokens))
  T, p = tokens_BT.shape[1], params['embed']
  if T > config.max_positions:
    raise UserError(f'a row of {T} tokens is longer than the model.max_positions = {config.max_positions} that the '
                    'model has positions for.')
  x_BTD = p['table'][tokens_BT] + p['positions'][attention.positions(T, segment_ids_BT)]
  return (x_BTD + p['types'].at[types_BT].get(mode='fill', fill_value=jnp.nan)).astype(param.dtypes(config)[1])


def logits(config: config_lib.ModelConfig, params, normed_BTD: jax.Array) -> jax.Array:
  """What the head reads -> [B, T, V], or [B, T, 2] of start and end; float32 or wider.

  Raises UserError for a model without a head.
  """
  if config.head == 'none':
    raise UserError('a model with model.head = none has neither logits nor a loss; its states, and what is measured '
                    'on them, are all that it has.')
  p = params['head']
  if config.head == 'squad':
    table, bias = p['span'], p['span_bias']
  else:
    hidden_BTD = param.dot('BTD,DE->BTE', normed_BTD, p['dense']) + p['dense_bias'].astype(normed_BTD.dtype)
    normed_BTD = Norm(config).apply({'params': p.get('norm', {})}, jax.nn.gelu(hidden_BTD, approximate=False))
    table, bias = params['embed' if config.tie_embeddings else 'head']['table'], p['bias']
  scores = loss.logits(normed_BTD, table)
  return scores + bias.astype(scores.dtype)


def weights(batch) -> jax.Array:
  """[B, T] float32: as given, or 1 on every real token whose target, if there are targets, is not IGNORED.

  Of model.head = mlm: what a target counts in the loss. Of squad: whether a position may start or end an answer.
  """
  if 'weights' in batch:
    return batch['weights']
  real_BT = loss.real_tokens(batch)
  return real_BT * (batch['targets'] != IGNORED) if 'targets' in batch else real_BT


def real_tokens(config: config_lib.ModelConfig, batch) -> jax.Array:
  """[B, T] float32: 1 on every token that is not padding."""
  return loss.real_tokens(batch)


def row_losses(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch) -> tuple[jax.Array, jax.Array]:
  """(summed loss of each row [B], its weight [B]).

  batch: with 'targets' [B, T], the tokens behind the masked ones; of model.head = squad with 'labels' [B, 2], the
    positions of the answer's first and last token. A row's loss is then the mean of the cross-entropies of both over
    the positions that may answer, NaN where the answer is none of them; a row without such positions weighs 0.
  """
  scores, w_BT = logits(config, params, normed_BTD), weights(batch)
  if config.head == 'mlm':
    losses_BT = loss.token_losses(scores, loss.answers(batch, 'targets'), w_BT)
    return jnp.sum(losses_BT, axis=-1), jnp.sum(w_BT, axis=-1)
  return _span_losses(scores, loss.answers(batch, 'labels'), w_BT > 0)


def _span_losses(scores_BT2: jax.Array, labels_B2: jax.Array, may_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
  logs_BT2 = jax.nn.log_softmax(among(scores_BT2, may_BT), axis=1)
  outside_B2 = loss.outside_vocabulary(labels_B2, may_BT.shape[1])
  at_B2 = jnp.where(outside_B2, 0, labels_B2)
  wrong_B2 = outside_B2 | ~jnp.take_along_axis(may_BT, at_B2, axis=1)
  found_B2 = jnp.take_along_axis(logs_BT2, at_B2[:, None], axis=1)[:, 0]
  counts_B = jnp.any(may_BT, axis=1)
  losses_B = jnp.mean(jnp.where(wrong_B2, jnp.nan, -found_B2), axis=-1)
  return jnp.where(counts_B, losses_B, 0), counts_B.astype(scores_BT2.dtype)


def among(scores_BT2: jax.Array, may_BT: jax.Array) -> jax.Array:
  """Start and end logits, the lowest number there is at positions that may not answer."""
  return jnp.where(may_BT[..., None], scores_BT2, jnp.finfo(scores_BT2.dtype).min)


def summed_loss(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch, chunk: int = 0):
  """(summed loss, weight) of a batch. chunk: of no use, the decoder has a bias."""
  losses_B, w_B = row_losses(config, params, normed_BTD, batch)
  return jnp.sum(losses_B), jnp.sum(w_B)


def scores(config: config_lib.ModelConfig, params, normed_BTD: jax.Array, batch) -> dict[str, jax.Array]:
  """Sums of an evaluation besides the loss: 'correct', the weight of masked tokens, or of rows, that are right."""
  found, w_BT = logits(config, params, normed_BTD), weights(batch)
  if config.head == 'mlm':
    return {'correct': jnp.sum((jnp.argmax(found, axis=-1) == loss.answers(batch, 'targets')) * w_BT)}
  best_B2 = jnp.argmax(among(found, w_BT > 0), axis=1)
  right_B = jnp.all(best_B2 == loss.answers(batch, 'labels'), axis=-1) & jnp.any(w_BT > 0, axis=1)
  return {'correct': jnp.sum(right_B.astype(jnp.float32))}


def row_shapes(config: config_lib.ModelConfig, T: int) -> dict[str, jax.ShapeDtypeStruct]:
  """What a row of training consists of."""
  ids, w = jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((T,), jnp.float32)
  of_head = {'mlm': {'targets': ids, 'weights': w}, 'none': {},
             'squad': {'token_types': ids, 'weights': w, 'labels': jax.ShapeDtypeStruct((2,), jnp.int32)}}
  return {'tokens': ids, 'segment_ids': ids} | of_head[config.head]
