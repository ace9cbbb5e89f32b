"""Logit lens: what the model would predict if it stopped after a layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import effective, finite
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.depth.states import INPUTS
from lns_jax.errors import UserError
from lns_jax.models import transformer

TOP = 5  # highest predictions that are compared
READ = (*INPUTS, 'targets', 'labels')


@functools.partial(jax.jit, static_argnums=0)
def _sums(config: ModelConfig, params, batch):
  """({name: sums over the positions of each row [L + 1, B]}, weights [B], `finite.first_bad` [B, L + 1])."""
  family = transformer.family(config)
  states = transformer.states(config, params, transformer.inputs(config, batch), **transformer.placement(batch))
  w = family.weights(batch)
  def predicted(x_BTD):
    normed_BTD = transformer.final_norm(config, params, x_BTD)
    logs = jax.nn.log_softmax(family.logits(config, params, normed_BTD))
    return normed_BTD, logs, jax.lax.top_k(logs, min(TOP, logs.shape[-1]))[1]
  _, final, final_top = predicted(states[-1])
  def one(x_BTD):
    normed_BTD, logs, top = predicted(x_BTD)
    loss, weight = family.row_losses(config, params, normed_BTD, batch)
    shared = jnp.mean(jnp.any(top[..., :, None] == final_top[..., None, :], axis=-1), axis=-1)
    total = lambda v: jnp.sum((w * v).reshape(len(w), -1), axis=-1)
    return {'lens_loss': loss, 'lens_kl': total(jnp.sum(jnp.exp(final) * (final - logs), axis=-1)),
            'lens_reverse_kl': total(jnp.sum(jnp.exp(logs) * (logs - final), axis=-1)),
            'lens_overlap': total(shared)}, weight
  sums, weights = jax.lax.map(one, states)  # the logits of one state at a time
  return sums, weights[0], finite.first_bad(states, family.real_tokens(config, batch))


def logit_lens(config: ModelConfig, params, batches, *, seed: int = 0) -> dict[str, Estimate]:
  """The final norm and the head on every state of the residual stream, in one pass (nostalgebraist's logit lens).

  Of a ViT the prediction is of the class, from the state of the CLS token or the mean over patches, as the model has
  it. Every number is a mean over what the loss is a mean over: weighed targets, or images.

  Args:
    batches: as everywhere, with 'targets' [B, T], or 'labels' [B] beside images.

  Returns:
    Each [L + 1], the embedding first, the model's own prediction last:
    'lens_loss': loss on the targets, nats. 'lens_kl': KL(final || lens), nats, as of the tuned lens (arXiv
    2303.08112). 'lens_reverse_kl': KL(lens || final), as of Csordas et al. (arXiv 2505.13898). 'lens_overlap': share
    of the final prediction's five highest (of all, where there are fewer) that are among the lens's.
    And 'effective_depth_kl' and 'effective_depth_overlap' [], with 'effective_ratio_...': see `effective`.

  Raises:
    UserError: no batch, no targets, or a state or a loss that is not finite.
  """
  if config.family == 'encoder' and config.head == 'squad':
    raise UserError('the lens compares what is predicted at each position; a model with model.head = squad chooses two '
                    'positions of a row.')
  means = {}
  sequences = 0
  for batch in batches:
    if not {'targets', 'labels'} & set(batch):
      raise UserError(f"the lens reads 'targets', or 'labels' beside images, but the batch has {sorted(batch)}.")
    sums, weights, bad = jax.device_get(_sums(config, params, {k: batch[k] for k in READ if k in batch}))
    finite.check(config, params, bad, sequences)
    if not np.isfinite(sums['lens_loss']).all():
      row = int(np.argmin(np.isfinite(sums['lens_loss']).all(axis=0)))
      raise UserError(f'the loss of sequence {sequences + row} is not finite; are all its targets in the vocabulary?')
    for name, values in sums.items():
      means.setdefault(name, Mean(seed)).add(values.T, weights)
    sequences += len(weights)
  if not sequences:
    raise UserError('there are no batches to measure on.')
  tokens = means['lens_loss'].tokens
  if not tokens:
    raise UserError('there is nothing to predict: every target is padding or masked.')
  return {**{name: mean.estimate() for name, mean in means.items()},
          **effective.estimates('kl', effective.by_kl(means['lens_reverse_kl'].each()), config.num_layers, tokens),
          **effective.estimates('overlap', effective.by_overlap(means['lens_overlap'].each()), config.num_layers,
                                tokens)}
