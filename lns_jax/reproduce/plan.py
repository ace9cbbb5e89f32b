"""Which runs a table of schemes wants next, as data: a function of the losses that are known.

An arm is what is compared with pre: a scheme, or a scheme with other settings. First every arm runs at three rates
with seed 0, then beyond the ends of those rates where the best is at an end, then come more seeds at the common
rate and at each arm's best. An interrupted table is useful all along.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from lns_jax.layers import schemes

BASELINE = 'pre'
FIRST = (BASELINE, 'lns')  # wanted most: they run first and with more seeds
SEEDS, MORE_SEEDS = 3, 5
BEYOND = 2  # factors of 2 tried beyond each end of the first three rates

# Rows of the table that are a scheme with other settings: {arm: {group: {setting: value}}}.
VARIANTS = {
    'lns_attn_only': {'model': {'scheme': 'lns', 'p_mlp': 0.0}},
    'lns_mlp_only': {'model': {'scheme': 'lns', 'p_attn': 0.0}},
}


def arms() -> dict[str, dict]:
  """Settings by arm, {name: {group: {setting: value}}}, those wanted most first."""
  names = [*FIRST, *(s for s in schemes.SCHEMES if s not in FIRST)]
  return {name: {'model': {'scheme': name}} for name in names} | VARIANTS


@dataclasses.dataclass(frozen=True, order=True)
class Spec:
  """One run: an arm at a learning rate; the seed is that of weights and of the order of rows, so that it pairs arms."""

  arm: str
  rate: float
  seed: int

  @property
  def name(self) -> str:
    """Name of its run folder."""
    return f'{self.arm}_lr{self.rate:g}_seed{self.seed}'


# The final validation loss of finished runs, infinite where they diverged.
Losses = Mapping[Spec, float]


def grid(arm: str, common: float, losses: Losses) -> list[Spec]:
  """Runs with seed 0 that find the best rate, as far as the losses tell: common / 2, common, 2 common and beyond."""
  spec = lambda k: Spec(arm, common * 2.0**k, 0)
  low, high = -1, 1
  while True:
    specs = [spec(k) for k in range(low, high + 1)]
    if any(s not in losses for s in specs):
      return specs
    best = min(range(low, high + 1), key=lambda k: losses[spec(k)])  # of equals the lowest: stable, and finite if any
    if best == low and low > -1 - BEYOND:
      low -= 1
    elif best == high and high < 1 + BEYOND:
      high += 1
    else:
      return specs


def best_rate(arm: str, common: float, losses: Losses) -> float | None:
  """The rate with the lowest loss of seed 0; None while the grid has gaps, and where every rate diverged."""
  specs = grid(arm, common, losses)
  if any(s not in losses for s in specs):
    return None
  best = min(specs, key=lambda s: losses[s])
  return best.rate if math.isfinite(losses[best]) else None


def at_the_end(arm: str, common: float, losses: Losses) -> bool:
  """Whether the best rate is still at an end of all that were tried."""
  rates, best = [s.rate for s in grid(arm, common, losses)], best_rate(arm, common, losses)
  return best is not None and best in (rates[0], rates[-1])


def seeds(arm: str) -> range:
  """Seeds of an arm at the common and at its best rate."""
  return range(MORE_SEEDS if arm in FIRST else SEEDS)


def wanted(names: Sequence[str], common: float, losses: Losses) -> list[Spec]:
  """All runs that are known to be wanted, in the order in which to do them, finished ones among them."""
  grids = {arm: grid(arm, common, losses) for arm in names}
  first = [s for specs in grids.values() for s in specs if common / 2 <= s.rate <= common * 2]
  beyond = [s for specs in grids.values() for s in specs if s not in first]
  best = {arm: best_rate(arm, common, losses) for arm in names}
  # All seeds at the best rates, which the verdicts are of, before any at the common one.
  more = [Spec(arm, rate, seed) for rates in (best, dict.fromkeys(names, common)) for seed in range(1, MORE_SEEDS)
          for arm in names if seed in seeds(arm) and (rate := rates[arm]) is not None]
  return list(dict.fromkeys(first + beyond + more))


def expected(names: Sequence[str], common: float, losses: Losses) -> int:
  """How many runs the whole table may come to: those wanted, and more seeds of the arms whose best rate is open."""
  is_open = [a for a in names if any(s not in losses for s in grid(a, common, losses))]
  return len(wanted(names, common, losses)) + sum(len(seeds(a)) - 1 for a in is_open)
