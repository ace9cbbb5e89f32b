"""What a run says when its loss or gradient is no longer finite: the first bad place and the rows that led to it."""

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.errors import Diverged
from lns_jax.models import layout, loss, transformer
from lns_jax.train.run import Run


def stop(run: Run, params, step: int, metrics: dict, batch, last_checkpoint: int | None):
  """Raises Diverged. `params` are the last good ones: a bad step updates nothing."""
  where = bad_target(run.config.model, batch) or first_bad(run.config.model, params, batch, step - 1)
  if where is None:
    grads = metrics.get('layer_grad_norm', ())
    bad = [l for l, g in zip(run.config.model.layer_ids, grads) if not np.isfinite(g)]
    where = f'the gradient of layer {bad[-1]}' if bad else 'the gradient'
  B = run.config.train.batch_size
  kept = 'there is no checkpoint yet'
  if last_checkpoint is not None:
    kept = f'the last checkpoint is of step {last_checkpoint}'
  raise Diverged(f"step {step}: loss {metrics['loss']} and gradient norm {metrics['grad_norm']} are not both finite, "
                 f'first in {where}, on rows {(step - 1) * B} to {step * B - 1} of the shuffled order; '
                 f'nothing was updated and {kept}.')


def bad_target(config: ModelConfig, batch) -> str | None:
  """Name of the first weighed target that is not in the vocabulary; None when all are."""
  if 'targets' not in batch:
    return None  # labels are checked when they are read
  def first(batch):
    targets_BT = batch['targets']
    bad_BT = loss.outside_vocabulary(targets_BT, config.vocab_size) & (loss.weights(batch) > 0)
    at = jnp.argmax(bad_BT)  # the first of the flattened batch
    return {'any': bad_BT.any(), 'at': at, 'target': targets_BT.ravel()[at]}
  found = jax.device_get(jax.jit(first)(batch))
  if not found['any']:
    return None
  row, position = divmod(int(found['at']), batch['targets'].shape[1])
  return (f"the target {found['target']} at position {position} of row {row} of the batch, "
          'outside of the vocabulary')


def first_bad(config: ModelConfig, params, batch, step: int) -> str | None:
  """Name of the first place of the forward pass after `step` updates that is not finite; None when all of it is."""
  def check(params, batch):
    bad = lambda x: ~jnp.all(jnp.isfinite(x))
    read = lambda out: {'bad': jax.vmap(bad)(out['out'])}  # of each row
    # Not the logits, which may not fit for a whole batch.
    normed_BTD, kept = transformer.before_head(config, params, batch, read, step)
    ends = [normed_BTD, *jax.tree.leaves(params.get('head', params['embed']))]
    layers_LB = layout.joined(kept['layers'])['bad']
    return {'states': jnp.concatenate([kept['embed']['bad'][None], layers_LB]).any(axis=1),
            'head': jnp.any(jnp.stack([bad(x) for x in ends]))}
  found = jax.device_get(jax.jit(check)(params, batch))
  for l, bad in zip((0, *config.layer_ids), found['states']):
    if bad:
      return f'layer {l}' if l else 'the embedding'
  return 'the head' if found['head'] else None
