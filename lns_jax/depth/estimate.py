"""Streaming means over tokens with bootstrap intervals over sequences."""

import dataclasses

import numpy as np

REPLICATES = 500


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean per token and its 95 % interval over sequences, arrays of the measure's shape, NaN where undefined.

  tokens: weight behind the mean (of the entry with most).
  """

  value: np.ndarray
  low: np.ndarray
  high: np.ndarray
  tokens: float


class Mean:
  """sum / weight, accumulated in float64 in memory that does not grow with the sample.

  The interval is the Poisson bootstrap: each sequence enters each replicate Poisson(1) times, so that the
  replicates can be summed on the way. The draws depend on `seed` alone: measures with the same seed and
  sequences are paired.
  """

  def __init__(self, seed: int = 0):
    self._draws = np.random.default_rng(seed)
    self._sum = self._weight = 0.0
    self.sequences = 0

  def add(self, sums, weights):
    """sums: [B, ...], one entry a sequence; weights: the same shape, or broadcastable to it from the left."""
    sums, weights = np.asarray(sums, np.float64), np.asarray(weights, np.float64)
    weights = np.broadcast_to(weights.reshape(weights.shape + (1,) * (sums.ndim - weights.ndim)), sums.shape)
    B = len(sums)
    self.sequences += B
    counts = np.concatenate([np.ones((1, B)), self._draws.poisson(1.0, (B, REPLICATES)).T])
    self._sum = self._sum + np.tensordot(counts, sums, 1)
    self._weight = self._weight + np.tensordot(counts, weights, 1)

  def estimate(self) -> Estimate:
    """The mean so far. Entries without weight are NaN."""
    with np.errstate(invalid='ignore', divide='ignore'):
      each = self._sum / self._weight
    undefined = np.isnan(each[0])
    filled = np.where(undefined, 0.0, each)
    low, high = np.nanquantile(filled[1:], [0.025, 0.975], axis=0)
    blank = lambda v: np.where(undefined, np.nan, v)
    return Estimate(each[0], blank(low), blank(high), float(np.max(self._weight[0])))
