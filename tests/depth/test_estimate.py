"""Streaming means and their intervals."""

import numpy as np
import pytest

from lns_jax.depth.estimate import Mean


def test_weighted_mean_over_any_split():
  rng = np.random.default_rng(0)
  values, weights = rng.normal(size=(12, 3)), rng.integers(1, 9, 12).astype(float)
  whole, parts = Mean(), Mean()
  whole.add(values * weights[:, None], weights)
  for i in range(0, 12, 5):
    parts.add((values * weights[:, None])[i:i + 5], weights[i:i + 5])
  np.testing.assert_allclose(whole.estimate().value, np.average(values, axis=0, weights=weights))
  np.testing.assert_allclose(parts.estimate().value, whole.estimate().value)
  assert whole.estimate().tokens == weights.sum()


def test_the_interval_covers_the_truth_about_95_times_in_100():
  rng, covered = np.random.default_rng(1), 0
  for trial in range(200):
    mean = Mean(seed=trial)
    mean.add(rng.normal(loc=2.0, size=(80,)), np.ones(80))
    e = mean.estimate()
    covered += e.low <= 2.0 <= e.high
  assert 0.88 <= covered / 200 <= 0.99


def test_entries_without_weight_are_nan_and_the_others_are_not():
  mean = Mean()
  mean.add(np.array([[1.0, 0.0]]), np.array([[2.0, 0.0]]))
  e = mean.estimate()
  assert e.value[0] == 0.5 and np.isnan(e.value[1]) and np.isnan(e.low[1]) and np.isnan(e.high[1])


def test_one_sequence_has_no_interval():
  mean = Mean()
  mean.add(np.array([[3.0, 1.0], [0.0, 0.0]]), np.array([2.0, 0.0]))  # the second is padding
  e = mean.estimate(lambda each: each * 2)
  assert list(e.value) == [3.0, 1.0] and np.isnan(e.low).all() and np.isnan(e.high).all()
  mean.add(np.array([[1.0, 1.0]]), np.array([1.0]))
  assert np.isfinite(mean.estimate().low).all()


def test_the_same_seed_is_paired():
  a, b = Mean(3), Mean(3)
  x = np.random.default_rng(0).normal(size=20)
  a.add(x, np.ones(20))
  b.add(x + 1, np.ones(20))
  assert b.estimate().low == pytest.approx(a.estimate().low + 1)
