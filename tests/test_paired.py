"""Intervals against hand calculation and scipy."""

import numpy as np
import pytest
from scipy import stats

from lns_jax import paired


def test_three_pairs_by_hand():
  # Differences -1, -2, -3: mean -2, sd 1, t(2) = 4.3027, half = 4.3027 / sqrt(3).
  found = paired.interval([-1.0, -2.0, -3.0])
  assert found['mean_difference'] == -2 and found['interval'] == pytest.approx([-4.48414, 0.48414], abs=1e-4)


def test_five_pairs_as_scipy_has_them():
  differences = np.random.default_rng(0).normal(0.1, 1, 5)
  expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
  assert paired.interval(list(differences))['interval'] == pytest.approx([expected.low, expected.high])


def test_one_pair_has_no_interval():
  assert paired.interval([0.5]) == {'pairs': 1, 'mean_difference': 0.5, 'interval': None}
