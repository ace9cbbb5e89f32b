"""Linear replaceability: what a layer adds as a least-squares linear map of what enters it, and what that costs.

"Usefulness" of arXiv 2603.15389: the share of layers whose replacement raises the loss by more than 10 %. There the
map is fitted and judged on the same tokens; here on two halves of the sample, or a map of D + 1 numbers for each unit
would look good on few tokens for no reason but its size.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import finite, interventions
from lns_jax.depth.estimate import Estimate, Mean, known
from lns_jax.depth.interventions import Plan
from lns_jax.depth.states import INPUTS
from lns_jax.errors import UserError
from lns_jax.layers import param
from lns_jax.layers.norms import wide
from lns_jax.models import transformer

USEFUL = 0.1  # rise of the loss, relative to the whole model's
RIDGE = 1e-6  # of the variance of each unit: keeps units that are constant or copies of others from blowing up


class NormalEquations:
  """Least squares of y [N, D] on x [N, D] and an intercept, accumulated in float64: memory does not grow with N."""

  def __init__(self, D: int):
    self._sums = np.zeros((D + 1, 2 * D + 1))

  @property
  def tokens(self) -> int:
    return int(self._sums[-1, len(self._sums) - 1])

  def add(self, x: np.ndarray, y: np.ndarray):
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 1)], constant_values=1)
    self._sums += x.T @ np.concatenate([x, y], axis=1)

  def solve(self, ridge: float = RIDGE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slope [D, D], intercept [D], mean of y [D]): y = x @ slope + intercept; ridge: of the variance of each x."""
    D = len(self._sums) - 1
    sums = self._sums / self._sums[D, D]
    x, y = sums[D, :D], sums[D, D + 1:]
    covariance, cross = sums[:D, :D] - np.outer(x, x), sums[:D, D + 1:] - np.outer(x, y)
    scale = np.sqrt(np.diag(covariance).clip(0))
    scale[scale <= 1e-6 * np.abs(x)] = np.inf  # a constant, but for rounding
    correlation = covariance / scale / scale[:, None] + ridge * np.eye(D)
    slope = np.linalg.solve(correlation, cross / scale[:, None]) / scale[:, None]
    return slope, y - x @ slope, y


@functools.partial(jax.jit, static_argnums=0)
def _errors(config: ModelConfig, params, batch, keep_B, maps):
  """(squared error of the maps, that of the fitted mean) of each row and layer [B, L], and `finite.first_bad`."""
  states, mask_BT, bad = finite.states(config, params, batch)
  w_BT = mask_BT * keep_B[:, None]
  total = lambda v: jnp.sum(w_BT * jnp.sum(jnp.square(v), axis=-1), axis=-1)
  def layer(entry):
    x, out, slope, intercept, mean = entry
    added = out.astype(wide(x)) - x
    return total(added - param.dot('BTD,DE->BTE', x.astype(wide(x)), slope) - intercept), total(added - mean)
  errors, spread = jax.lax.map(layer, (states[:-1], states[1:], *maps))
  return errors.T, spread.T, bad


def _half(batches, part: int) -> Iterator[tuple[int, dict, np.ndarray]]:
  """(sequences before it, batch, which rows belong to the half [B]): rows 1, 3, 5, ... of the sample, or 2, 4, ..."""
  start = 0
  for batch in batches:
    B = len(next(iter(batch.values())))
    keep = (start + np.arange(B)) % 2 == part
    if keep.any():
      yield start, batch, keep
    start += B


def _read(batch: dict) -> dict:
  return {k: batch[k] for k in INPUTS if k in batch}


def _fitted(config: ModelConfig, params, batches):
  """(slopes [L, D, D], intercepts [L, D], means of what is added [L, D]) of the first half, in the compute type."""
  L, D = config.num_layers, config.d_model
  equations = [NormalEquations(D) for _ in range(L)]
  for start, batch, keep in _half(batches, 0):
    states, mask, bad = jax.device_get(finite.states(config, params, _read(batch)))
    finite.check(config, params, bad, start)
    chosen = (mask > 0) & keep[:, None]
    for l in range(L):
      x, out = (states[i][chosen].astype(np.float64) for i in (l, l + 1))
      equations[l].add(x, out - x)
  if equations[0].tokens < D + 1:
    raise UserError(f'a linear map of {D} units is fitted on {D + 1} real tokens or more; the half of the sample that '
                    f'is for that has {equations[0].tokens}.')
  dtype = jnp.promote_types(param.dtypes(config)[1], jnp.float32)
  return tuple(np.stack(of_layers).astype(dtype) for of_layers in zip(*(e.solve() for e in equations)))


def replaceability(config: ModelConfig, params, batches, *, seed: int = 0) -> dict[str, Estimate]:
  """Change of the loss when one layer's addition to the stream is replaced by a linear map of the stream.

  The map, with an intercept, is the least-squares fit of out - in on in, token by token, on the rows 1, 3, 5, ... of the
  sample; everything is measured on the rows 2, 4, ..., however they fall into batches. A map has D (D + 1) numbers: on
  few more than D fitting tokens it fails on the others whatever the layer does.

  Args:
    batches: a sequence, or something else that can be read twice, with 'targets' [B, T], or 'labels' [B] beside images.

  Returns:
    'linear_baseline' []: loss of the model on the held-out half. 'linear_rise' [L]: loss with layer l replaced, less
    that. 'linear_r2' [L]: 1 - squared error of the map / squared distance from the fitted mean, over all units of the
    held-out tokens; 1 for a linear layer, below 0 for a useless map, NaN for a layer that adds nothing. 'usefulness'
    []: share of layers whose replacement raises the loss by more than USEFUL of it.

  Raises:
    UserError: batches that can be read only once, fewer fitting tokens than D + 1, nothing held out, or a state or a
      loss that is not finite.
  """
  if iter(batches) is batches:
    raise UserError('the linear fit and its check read the batches twice: give a list of them, not an iterator.')
  if next(_half(batches, 1), None) is None:
    raise UserError('no sequence is held out to judge the linear fit on: give two rows or more.')
  slopes, intercepts, means = _fitted(config, params, batches)
  errors, family = Mean(seed), transformer.family(config)
  def held_out():
    for start, batch, keep in _half(batches, 1):
      found, spread, bad = jax.device_get(
          _errors(config, params, _read(batch), keep, (slopes, intercepts, means)))
      finite.check(config, params, bad, start)
      errors.add(found, spread)
      if not keep.all():
        w = family.weights(batch)
        batch = batch | {'weights': w * keep.reshape(-1, *[1] * (w.ndim - 1))}
      yield batch
  at = np.arange(config.num_layers)
  baseline, rise = interventions.run(config, params, held_out(), Plan.of('linear', at, at + 1),
                                     maps=(slopes, intercepts), seed=seed)
  useful = known(np.mean(rise.each() > USEFUL * baseline.each()[:, None], axis=1), baseline.each())
  return {'linear_baseline': baseline.estimate(), 'linear_rise': rise.estimate(),
          'linear_r2': Estimate.of(1 - errors.each(), baseline.tokens),
          'usefulness': Estimate.of(useful, baseline.tokens)}
