"""What measured numbers say, in sentences that hold for whatever was measured: no direction is taken for granted.

`schemes` and `models` are the same kind of mapping: name -> what was found of a model, the keys of depth.json and, in
the 'schemes' of a quickstart's summary, its losses. A model without a measure, as one that diverged, is left out of what
is said of it.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from lns_jax.depth import removal as removal_lib
from lns_jax.depth.plots import floats

POINT = 0.01  # of an accuracy: a layer that costs less costs little
SMALL = 100 * removal_lib.SMALL  # percent of the loss: below it, a layer counts as removable


def number(value: float, digits: int = 3) -> str:
  """Significant digits; a dash for nothing."""
  if value is None or not np.isfinite(value):
    return '–'
  if abs(value) >= 10 ** (digits - 1) or not value:
    return f'{value:,.0f}'
  return f'{value:#.{digits}g}'


def listed(items) -> str:
  """'a, b and c'."""
  *first, last = items
  return f'{", ".join(first)} and {last}' if first else last


def with_measure(schemes: Mapping[str, dict], measure: str) -> dict[str, dict]:
  """The models that have it."""
  return {name: found for name, found in schemes.items() if found.get(measure) is not None}


def _each(schemes: Mapping[str, dict], measure: str, say: Callable[[dict], str]) -> str:
  return listed([f'{say(found)} in {name}' for name, found in with_measure(schemes, measure).items()])


def losses(schemes: Mapping[str, dict]) -> str:
  """Which model ends with the lowest validation loss, by how much, and why that is no verdict."""
  ended = sorted((found['val_loss'], name) for name, found in with_measure(schemes, 'val_loss').items())
  if not ended:
    return 'No model reached the end of its training.'
  (low, first), (high, last) = ended[0], ended[-1]
  if len(ended) == 1:
    return f'{first} reached a validation loss of {low:.4f} nats per token; there is no other model to compare it with.'
  caution = 'this is one seed, so it says what these runs did, not which scheme is better'
  if f'{low:.4f}' == f'{high:.4f}':
    return f'The validation losses of {listed([n for _, n in ended])} agree to four decimals ({low:.4f}); {caution}.'
  word = 'lower' if len(ended) == 2 else 'lowest'
  return (f'{first} ended with the {word} validation loss, {low:.4f} nats per token, {high - low:.4f} '
          f'({number(100 * (high - low) / high)}%) below {"" if len(ended) == 2 else "the highest, that of "}{last} '
          f'({high:.4f}); {caution}.')


def divergences(schemes: Mapping[str, dict]) -> list[str]:
  """One sentence a model that diverged."""
  reason = lambda found: found.get('reason') or 'no reason was recorded.'
  return [f'{name} diverged, so it has no final loss and no measures: {reason(found)}'
          for name, found in schemes.items() if found.get('diverged')]


def percent(found: dict, values) -> np.ndarray:
  """Rises of the loss (nats per token) in percent of the whole model's loss on the same sample."""
  return 100 * floats(values) / found['baseline']


def removable(found: dict) -> int:
  """Layers whose removal, one at a time, raises the loss by less than SMALL percent."""
  return int(np.sum(percent(found, found['layer_drop']) < SMALL))


def removal(schemes: Mapping[str, dict]) -> list[str]:
  """How many layers are removable one at a time, and which costs most."""
  def count(found):
    return f'{removable(found)} of {found["layers"]} layers'
  def dearest(found):
    rises = percent(found, found['layer_drop'])
    worst = int(np.nanargmax(rises))
    return f'layer {found["layer_ids"][worst]} ({rises[worst]:+.1f}%)'
  return [f'Taken out one at a time, without any retraining, {_each(schemes, "layer_drop", count)} raise the loss by '
          f'less than {SMALL:g}%.',
          f'The layer that costs most is {_each(schemes, "layer_drop", dearest)}.']


def task(schemes: Mapping[str, dict]) -> str:
  """Accuracy of each model, how many layers cost it less than one point, and whether that says anything."""
  def say(name, found):
    drops = floats(found['task_drop'])
    free = int(np.sum(drops > -POINT))
    interval = found['intervals']['task_baseline']
    return (f'{name} is right on {100 * found["task_baseline"]:.1f}% ({100 * interval["low"]:.1f} to '
            f'{100 * interval["high"]:.1f}), and {free} of its {found["layers"]} layers, taken out one at a time, cost '
            f'it less than one percentage point')
  measured = with_measure(schemes, 'task_drop')
  said = f'{"; ".join(say(*item) for item in measured.items())}.'
  chance = next(iter(measured.values()))['task']['chance']
  if chance is None:
    return said
  said += f' Guessing would be right on {100 * chance:.1f}%.'
  guess = [name for name, found in measured.items() if found['intervals']['task_baseline']['low'] <= chance]
  return said + (f' {listed(guess)} cannot be told from guessing, so that no layer of it can be seen to matter.'
                 if guess else '')


def counted(value, low, high) -> str:
  """'12 (11 to 13)': a number of layers and its interval, whose ends are rounded outward where they fall between two."""
  ends = '' if low is None or high is None else f' ({math.floor(low)} to {math.ceil(high)})'
  return '–' if value is None else f'{value:g}{ends}'


def headline(models: Mapping[str, dict]) -> str:
  """How many layers of each model could go, one at a time and together; empty where neither was measured."""
  def say(name, found):
    ends = lambda key: [found['intervals'][key][end] for end in ('low', 'high')]
    alone, together = (counted(found[key], *ends(key)) if found.get(key) is not None else ''
                       for key in ('removable', 'prunable'))
    of = f'of its {found["layers"]} layers'
    parts = [f'any one of {alone} {of}'] if alone else []
    parts += [f'{together} {"" if alone else f"{of} "}together'] if together else []
    return f'{name} can lose {", or ".join(parts)}' if parts else ''
  said = [words for item in models.items() if (words := say(*item))]
  return f'At less than {SMALL:g}% more loss, and without any retraining, {"; ".join(said)}.' if said else ''


def together(models: Mapping[str, dict]) -> str:
  """What a quarter and half of the layers cost when they are taken out together, greedily; empty for shallow models."""
  def say(found, n):
    interval = found['intervals']['prune_rise']
    rise, low, high = (100 * floats(v)[n - 1] / found['prune_baseline']
                       for v in (found['prune_rise'], interval['low'], interval['high']))
    return f'{rise:+.1f}% ({low:+.1f} to {high:+.1f}) without {n}'
  said = [f'in {name} {say(found, found["layers"] // 4)}, {say(found, found["layers"] // 2)}'
          for name, found in with_measure(models, 'prune_rise').items() if found['layers'] >= 4]
  return f'Rise of the loss when the layers that cost least are taken out together: {"; ".join(said)}.' if said else ''


def longest_block(name: str, found: dict, costs: np.ndarray, least: float) -> str:
  """'3 from layer 7 on in NAME': the most consecutive layers that cost less than `least`; costs as `block_drop`."""
  n = int(np.max(np.flatnonzero(np.nanmin(costs, axis=1) < least), initial=-1)) + 1
  if not n:
    return f'no block of {name}'
  return f'{n} from layer {found["layer_ids"][int(np.nanargmin(costs[n - 1]))]} on in {name}'


def last_variance(schemes: Mapping[str, dict]) -> str:
  """Output variance of the last layer of each model, and the ratio of largest to smallest."""
  values = [found['variance'][-1] for found in with_measure(schemes, 'variance').values()]
  ratio = f', a ratio of {number(max(values) / min(values))}' if len(values) > 1 and min(values) > 0 else ''
  said = _each(schemes, 'variance', lambda found: number(found['variance'][-1]))
  return f'The output variance of the last layer is {said}{ratio}.'


def variance_growth(schemes: Mapping[str, dict]) -> str:
  """Last layer over first layer."""
  said = _each(schemes, 'variance', lambda found: number(found['variance'][-1] / found['variance'][1]))
  return f'The last layer\'s variance over the first layer\'s is {said}.'


def _median(values: np.ndarray) -> float | None:
  """Of the numbers among them, if there are any: a single layer has no second half."""
  known = values[np.isfinite(values)]
  return float(np.median(known)) if known.size else None


def halves(schemes: Mapping[str, dict], measure: str, what: str, row=floats) -> str:
  """How the median over the first half of the layers compares with that over the second. `row`: measure -> [L]."""
  def say(found):
    values = row(found[measure])
    middle = -(-len(values) // 2)
    return f'from {number(_median(values[:middle]))} to {number(_median(values[middle:]))}'
  return (f'From the first half of the layers to the second, the median of {what} goes '
          f'{_each(schemes, measure, say)}.')
