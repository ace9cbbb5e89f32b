"""Loss or score without layers, without sub-layers, without blocks of layers, and pruning one layer after another."""

import typing
from collections.abc import Callable

import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import interventions
from lns_jax.depth.estimate import Estimate, known
from lns_jax.depth.interventions import Plan, ScoreFn
from lns_jax.errors import UserError


SMALL = 0.01  # rise of the loss, relative to the whole model's, below which layers count as removable


def removable(rise, baseline) -> np.ndarray:
  """Number of entries along the last axis of `rise` that are below SMALL of the baseline: [..., L], [...] -> [...]."""
  return known(np.sum(rise < SMALL * baseline[..., None], axis=-1), baseline)


def last_third(rise) -> np.ndarray:
  """Share of the last third of the layers (L // 3 of them, at least one) in all rises above 0: [..., L] -> [...]."""
  costs = np.maximum(rise, 0)
  L = rise.shape[-1]
  with np.errstate(invalid='ignore', divide='ignore'):
    return np.sum(costs[..., L - max(L // 3, 1):], axis=-1) / np.sum(costs, axis=-1)


def check_spare(config: ModelConfig):
  """Refuses a model without a layer to spare."""
  if config.num_layers < 2:
    raise UserError('a model with one layer has no layer to spare: removal needs two or more.')


def layer_drop(config: ModelConfig, params, batches, *, score_fn: ScoreFn | None = None,
               seed: int = 0) -> dict[str, Estimate]:
  """Change of the loss when each single layer is removed, without fine-tuning (paper section 2.1, Delta P).

  Args:
    batches: as everywhere, with 'targets' [B, T], or 'labels' [B] beside images.
    score_fn: a score in place of the loss, see `interventions.ScoreFn`.

  Returns:
    'baseline' []: loss of the whole model, nats per token or image. 'layer_drop' [L]: loss without layer l minus the
    baseline; exactly 0 for a layer that does nothing. Of the loss alone: 'removable' []: number of layers that, removed
    alone, raise the loss by less than SMALL. 'last_third' []: share of the last third of the layers in the sum of the
    rises above 0.

  Raises:
    UserError: no batch, or a model with a single layer.
  """
  check_spare(config)
  at = np.arange(config.num_layers)
  plan = Plan.of('skip', at, at + 1)
  baseline, change = interventions.run(config, params, batches, plan, score_fn=score_fn, seed=seed)
  found = {'baseline': baseline.estimate(), 'layer_drop': change.estimate()}
  if score_fn is not None:
    return found
  return found | {'removable': change.estimate(lambda each: removable(each, baseline.each())),
                  'last_third': change.estimate(last_third)}


def sublayer_drop(config: ModelConfig, params, batches, *, score_fn: ScoreFn | None = None,
                  seed: int = 0) -> dict[str, Estimate]:
  """As `layer_drop`, for one sub-layer at a time, its norms and factors included.

  Returns 'baseline' [], 'attn_drop' [L] and 'mlp_drop' [L]: the loss without that sub-layer minus the baseline.
  """
  L = config.num_layers
  at = np.arange(L)
  plan = Plan.of('mlp', at, at + 1) + Plan.of('attn', at, at + 1)  # what stays
  baseline, change = interventions.run(config, params, batches, plan, score_fn=score_fn, seed=seed)
  return {'baseline': baseline.estimate(), 'attn_drop': change.estimate(lambda each: each[:, :L]),
          'mlp_drop': change.estimate(lambda each: each[:, L:])}


def block_drop(config: ModelConfig, params, batches, *, most: int | None = None, score_fn: ScoreFn | None = None,
               seed: int = 0) -> dict[str, Estimate]:
  """As `layer_drop`, for every block of n consecutive layers, n = 1..most (L - 1 by default).

  Returns 'baseline' [] and 'block_drop' [most, L]: entry [n - 1, l - 1] is without layers l, ..., l + n - 1; NaN
  where there are no such layers. Gromov et al. (arXiv 2403.17887) cut the block that costs least.
  """
  check_spare(config)
  L = config.num_layers
  most = L - 1 if most is None else min(most, L - 1)
  n, at = np.divmod(np.arange(most * L), L)
  inside = at + n + 1 <= L
  plan = Plan.of('skip', at[inside], at[inside] + n[inside] + 1)
  baseline, change = interventions.run(config, params, batches, plan, score_fn=score_fn, seed=seed)
  def grid(each):
    filled = np.full((len(each), most * L), np.nan)
    filled[:, inside] = each
    return filled.reshape(-1, most, L)
  return {'baseline': baseline.estimate(), 'block_drop': change.estimate(grid)}


class Pruned(typing.NamedTuple):
  """Layers in the order in which greedy pruning removed them, and the change of the loss after each removal.

  prunable is None of a score: it is defined by the loss.
  """

  order: tuple[int, ...]
  rise: Estimate
  baseline: Estimate
  prunable: Estimate | None


def prune(config: ModelConfig, params, batches, *, most: int | None = None, score_fn: ScoreFn | None = None,
          lower_is_better: bool = True, stop_at: float = np.inf, seed: int = 0,
          done: Callable[[list[int]], None] = lambda ids: None) -> Pruned:
  """Removes the layer that costs least, then of the rest the one that costs least then, and so on.

  Each round tries every layer that is left, on the same batches, through the same compiled program.

  Args:
    batches: read once a round: a sequence, or something else that can be read again.
    most: number of layers to remove; L - 1 by default.
    lower_is_better: whether a removal costs more the more it raises the score; the loss does.
    stop_at: rise of the score, relative to the whole model's, with which the removal that reaches it is the last one.
    done: called after each round with the ids of the layers removed so far.

  Returns:
    order: the layers' own ids. rise [most]: loss without the first 1, 2, ... of them minus that of the whole model.
    prunable []: how many of them can go before the rise of the loss reaches SMALL for the first time.

  Raises:
    UserError: as `layer_drop`, and for batches that can be read only once.
  """
  check_spare(config)
  if iter(batches) is batches:
    raise UserError('pruning reads the batches once a round: give a list of them, not an iterator.')
  L = config.num_layers
  removed, rises = [], []
  for _ in range(L - 1 if most is None else min(most, L - 1)):
    left = np.setdiff1d(np.arange(L), removed)
    # The plan keeps its length, or the program would be compiled again: it is filled up with what costs least time.
    plan = Plan.of('skip', left, left + 1) + Plan.of('skip', np.full(len(removed), L - 1), L)
    found, change = interventions.run(config, params, batches, plan, removed=removed, score_fn=score_fn, seed=seed)
    if not removed:
      baseline = found
    total = change.each()[:, :len(left)] + (found.each() - baseline.each())[:, None]
    best = int(np.nanargmin(total[0] if lower_is_better else -total[0]))
    removed.append(int(left[best]))
    rises.append(total[:, best])
    done([config.layer_ids[i] for i in removed])
    if rises[-1][0] >= stop_at * baseline.each()[0]:
      break
  each = np.stack(rises, axis=1)
  small = known(np.cumprod(each < SMALL * baseline.each()[:, None], axis=1).sum(axis=1), baseline.each())
  prunable = Estimate.of(small, baseline.tokens) if score_fn is None else None
  return Pruned(tuple(config.layer_ids[i] for i in removed), Estimate.of(each, baseline.tokens), baseline.estimate(),
                prunable)
