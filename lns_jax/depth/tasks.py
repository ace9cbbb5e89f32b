"""Accuracies as scores, for every measure that takes a `score_fn`: see `interventions.ScoreFn`."""

import functools

import jax
import jax.numpy as jnp

from lns_jax.depth.interventions import ScoreFn
from lns_jax.models import decoder, loss, vit


def accuracy(logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
  """Top-1 accuracy: next tokens of a language model, classes of a model of images; a row is a group.

  Every target counts what it counts in the loss: 'weights', or 1 on every token that is not padding. Of equal logits
  the first is the model's answer.

  Args:
    logits: [B, T, V]; of images [B, classes].
    batch: with 'targets' [B, T]; of images 'labels' [B].

  Returns:
    (weight of what is predicted right [B], weight [B]); NaN for logits that are, or a target outside the vocabulary.
  """
  images = 'images' in batch
  w = vit.weights(batch) if images else decoder.weights(batch)
  targets = jnp.where(w > 0, loss.answers(batch, 'labels' if images else 'targets'), 0)
  broken = loss.outside_vocabulary(targets, logits.shape[-1]) | jnp.isnan(jnp.max(logits, axis=-1))
  right = jnp.where(broken, jnp.nan, jnp.argmax(logits, axis=-1) == targets)
  in_rows = lambda v: jnp.sum(v.reshape(len(v), -1), axis=-1)
  return in_rows(jnp.where(w > 0, right * w, 0)), in_rows(w)


@functools.cache
def choice(K: int) -> ScoreFn:
  """Accuracy over questions with up to K choices, as lm-eval's `acc`; a question is a group.

  The answer is the choice whose tokens have the largest summed log-probability behind the context, the first of equals.
  Nothing is divided by a length (lm-eval's `acc_norm` divides by characters).

  The batch is that of `lns_jax.data.choices`: K rows a question, in order, 'weights' [B, T] 1 on the choice's targets,
  'right' [B] 1 on the right choice. Rows without weight are no choice; questions of such rows alone count nothing.
  """
  def score(logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
    w_BT = decoder.weights(batch)
    nats_QK = jnp.sum(loss.token_losses(logits, loss.answers(batch, 'targets'), w_BT), axis=-1).reshape(-1, K)
    real_QK = (jnp.sum(w_BT, axis=-1) > 0).reshape(-1, K)
    best_Q = jnp.argmin(jnp.where(real_QK, nats_QK, jnp.inf), axis=-1)
    right_Q = jnp.take_along_axis(batch['right'].reshape(-1, K), best_Q[:, None], axis=-1)[:, 0]
    broken_Q = jnp.any(jnp.isnan(nats_QK), axis=-1)
    weight_Q = jnp.any(real_QK, axis=-1).astype(jnp.float32)
    return jnp.where(broken_Q, jnp.nan, right_Q * weight_Q), weight_Q
  return score
