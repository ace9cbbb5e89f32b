"""Paired differences and their intervals."""

import numpy as np
from scipy import stats


def interval(differences: list[float]) -> dict:
  """{'pairs', 'mean_difference', 'interval' (95 %, Student's t; None for a single pair)} of at least one difference."""
  n, mean = len(differences), float(np.mean(differences))
  if n < 2:
    return {'pairs': n, 'mean_difference': mean, 'interval': None}
  half = float(stats.t.ppf(0.975, n - 1) * stats.sem(differences))
  return {'pairs': n, 'mean_difference': mean, 'interval': [mean - half, mean + half]}
