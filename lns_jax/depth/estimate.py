"""Streaming means over tokens with bootstrap intervals over sequences."""

import dataclasses
from collections.abc import Callable

import numpy as np

REPLICATES = 500


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A number and its 95 % interval over sequences, arrays of the measure's shape, NaN where undefined.

  tokens: weight behind the number (of the entry with most).
  """

  value: np.ndarray
  low: np.ndarray
  high: np.ndarray
  tokens: float

  @classmethod
  def of(cls, each: np.ndarray, tokens: float) -> 'Estimate':
    """From the number itself and its bootstrap replicates, [1 + replicates, ...]; no interval where all are NaN."""
    undefined = np.isnan(each[0]) | np.isnan(each[1:]).all(axis=0)
    drawn = np.where(undefined, 0.0, each)[1:] if len(each) > 1 else np.zeros_like(each)
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    blank = lambda v: np.where(undefined, np.nan, v)
    return cls(each[0], blank(low), blank(high), tokens)


def known(values: np.ndarray, each: np.ndarray) -> np.ndarray:
  """values, NaN where `each` is: what was counted of a replicate that drew nothing says nothing, not 0."""
  return np.where(np.isnan(each), np.nan, values)


class Mean:
  """sum / weight, accumulated in float64 in memory that does not grow with the sample.

  A single sequence has no interval. The interval is the Poisson bootstrap: each sequence enters each replicate
  Poisson(1) times, so that the replicates can be summed on the way. The draws depend on `seed` alone: measures with
  the same seed and sequences are paired, and what is computed from several of them can be computed replicate by
  replicate.
  """

  def __init__(self, seed: int = 0):
    self._draws = np.random.default_rng(seed)
    self._sum = self._weight = 0.0
    self.sequences = self._weighed = 0

  def add(self, sums, weights):
    """sums: [B, ...], one entry a sequence; weights: the same shape, or broadcastable to it from the left."""
    sums, weights = np.asarray(sums, np.float64), np.asarray(weights, np.float64)
    weights = np.broadcast_to(weights.reshape(weights.shape + (1,) * (sums.ndim - weights.ndim)), sums.shape)
    B = len(sums)
    self.sequences += B
    self._weighed += int(np.sum(weights.reshape(B, -1).any(axis=1)))
    counts = np.concatenate([np.ones((1, B)), self._draws.poisson(1.0, (B, REPLICATES)).T])
    self._sum = self._sum + np.tensordot(counts, sums, 1)
    self._weight = self._weight + np.tensordot(counts, weights, 1)

  @property
  def tokens(self) -> float:
    """The weight so far, of the entry with most."""
    return float(np.max(self._weight[0]))

  def each(self) -> np.ndarray:
    """[1 + REPLICATES, ...]: the mean so far and its replicates; NaN without weight, or without a second sequence."""
    with np.errstate(invalid='ignore', divide='ignore'):
      means = self._sum / self._weight
    if self._weighed < 2:
      means[1:] = np.nan
    return means

  def estimate(self, function: Callable[[np.ndarray], np.ndarray] = lambda each: each) -> Estimate:
    """The mean so far, or a function of it and of each replicate: [1 + REPLICATES, ...] -> the same of the result."""
    return Estimate.of(function(self.each()), self.tokens)
