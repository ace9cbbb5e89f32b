"""Token-averaged Jacobians against the diagonal blocks of those that jax.jacfwd writes out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lns_jax.config import ModelConfig
from lns_jax.depth import heat
from lns_jax.depth.heat import Grouped, mean_jacobian
from lns_jax.errors import UserError
from lns_jax.models import layout, transformer
from materialised import SMALL, VIT, by_row, small_batch, without_layer_2
from tiny import model, params, with_random_gains

EXACT = dict(probes=8)  # T = 6


@pytest.fixture(scope='module')
def case():
  return *without_layer_2(scheme='lns'), small_batch()


def own_blocks(matrix, D):
  """[n D, n D] -> [n, D, D]: dy_t / dx_t."""
  n = len(matrix) // D
  return matrix.reshape(n, D, n, D)[np.arange(n), :, np.arange(n)]


def exact(config, p, b):
  """[L, D, D]: the mean over all real tokens."""
  rows = by_row(config, p, b)
  return np.stack([np.concatenate([own_blocks(r[i], config.d_model) for r in rows]).mean(axis=0)
                   for i in range(config.num_layers)])


def test_as_many_probes_as_tokens_make_it_exact(case):
  config, p, b = case
  found = mean_jacobian(config, p, [b], layers=(4, 1), **EXACT)
  expected = exact(config, p, b)[[2, 0]]
  np.testing.assert_allclose(found['jacobian'].value, expected, atol=1e-5)
  np.testing.assert_allclose(found['singular_values'].value, np.linalg.svd(expected, compute_uv=False), atol=1e-5)
  for i, m in enumerate(expected):
    on = np.eye(len(m), dtype=bool)
    assert found['dominance'].value[i] == pytest.approx(np.abs(m[on]).mean() / np.abs(m[~on]).mean(), rel=1e-4)
  assert found['jacobian'].tokens == (b['segment_ids'] > 0).sum()
  assert (found['dominance'].low < found['dominance'].value).all()


def test_random_signs_are_unbiased_and_their_intervals_hold_the_truth(case):
  """One row many times over: all that differs between sequences is the signs."""
  config, p, b = case
  rows = {k: np.repeat(v[:1], 100, axis=0) for k, v in b.items()}
  expected, inside, off, errors = exact(config, p, {k: v[:1] for k, v in b.items()})[0], [], [], []
  for seed in range(20):
    found = mean_jacobian(config, p, [rows], layers=(1,), probes=1, seed=seed)
    (m,), (low,), (high,) = (getattr(found['jacobian'], name) for name in ('value', 'low', 'high'))
    inside.append((low <= expected) & (expected <= high))
    off.append(m - expected)
    errors.append((high - low) / 2 / stats.t.ppf(0.975, heat.GROUPS - 1))
  assert 0.9 < np.mean(inside) < 0.98
  assert 0.8 < np.sqrt(np.mean(np.square(off)) / np.mean(np.square(errors))) < 1.25
  assert np.abs(np.mean(off, axis=0) / np.std(off, axis=0, ddof=1) * np.sqrt(20)).max() < 4
  on = np.eye(len(m), dtype=bool)
  assert found['noise'].value[0] == pytest.approx(errors[-1][~on].mean() / np.abs(m[~on]).mean(), rel=1e-6)


def test_a_block_that_does_nothing_has_nothing_off_the_diagonal(case):
  config, p, b = case
  p = layout.unstack(jax.tree.map(lambda a: a, p))
  p['layers']['3']['attn']['o'] *= 0
  p['layers']['3']['mlp']['down'] *= 0
  found = mean_jacobian(config, p, [b], layers=(4, 3), **EXACT)
  np.testing.assert_array_equal(found['jacobian'].value[1], np.eye(config.d_model))
  assert found['dominance'].value[1] == np.inf and np.isfinite(found['dominance'].value[0])
  np.testing.assert_array_equal(found['singular_values'].value[1], 1.0)


def test_batches_padding_and_layouts_change_nothing(case):
  config, p, b = case
  whole = mean_jacobian(config, p, [b], layers=(1, 4), probes=1)
  empty = {k: np.zeros_like(v) for k, v in b.items()}
  other = b | {'tokens': np.where(b['segment_ids'] > 0, b['tokens'], 9)}
  padded = mean_jacobian(config, p, [other, empty], layers=(1, 4), probes=1)
  scan = dataclasses.replace(config, loop='scan')
  parts = [{k: v[i:i + 1] for k, v in b.items()} for i in range(3)]
  split = mean_jacobian(scan, layout.native(p, scan), parts, layers=(1, 4), probes=1)
  for name in whole:
    np.testing.assert_array_equal(padded[name].value, whole[name].value)
    np.testing.assert_allclose(split[name].value, whole[name].value, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(split[name].high, whole[name].high, rtol=1e-3, atol=1e-4)


def test_parameters_in_bfloat16_are_measured_in_float32(case):
  """What the same numbers as float32 parameters give."""
  _, _, b = case
  narrow = model(**SMALL, num_layers=1, scheme='lns', precision='paper_bf16')
  wide = dataclasses.replace(narrow, precision='float32')
  p = params(narrow)
  assert p['layers']['1']['mlp']['down'].dtype == jnp.bfloat16
  found = mean_jacobian(narrow, p, [b], **EXACT)
  expected = mean_jacobian(wide, jax.tree.map(lambda a: a.astype(jnp.float32), p), [b], **EXACT)
  np.testing.assert_allclose(found['jacobian'].value, expected['jacobian'].value, atol=1e-6)


def test_images_have_jacobians_and_padded_ones_have_none():
  config = ModelConfig(**SMALL, **VIT, num_layers=1)
  p = with_random_gains(transformer.init(config, jax.random.key(0)))
  images = np.random.default_rng(0).normal(size=(3, 4, 4, 3)).astype(np.float32)
  b = {'images': images, 'labels': np.zeros(3, np.int32), 'weights': np.float32([1, 0, 1])}
  found = mean_jacobian(config, p, [b], **EXACT)['jacobian']
  np.testing.assert_allclose(found.value, exact(config, p, b), atol=1e-5)
  assert found.tokens == 2 * config.num_tokens


def test_panels_are_spread_over_the_depth():
  assert heat.panels(model(num_layers=32)) == (1, 9, 17, 24, 32)
  assert heat.panels(model(num_layers=3)) == (1, 2, 3)


def test_what_cannot_be_measured_is_said(case):
  config, p, b = case
  with pytest.raises(UserError, match='no layer 2; its layers are 1-1,3-4'):
    mean_jacobian(config, p, [b], layers=(1, 2))
  with pytest.raises(UserError, match='no batches'):
    mean_jacobian(config, p, [])
  with pytest.raises(UserError, match='power of two'):
    mean_jacobian(config, p, [b], probes=3)
  with pytest.raises(UserError, match='no valid tokens'):
    mean_jacobian(config, p, [{k: np.zeros_like(v) for k, v in b.items()}], layers=(1, 4), probes=1)
  broken = layout.unstack(jax.tree.map(lambda a: a, p))
  broken['layers']['4']['mlp']['down'] *= np.nan
  with pytest.raises(UserError, match='the weight layers/4/mlp/down is not finite'):
    mean_jacobian(config, broken, [b], layers=(1, 4), probes=1)


# --- the jackknife


def test_without_ties_between_groups_the_interval_is_students_t():
  """Ten sequences of one weight are ten groups: the interval of a mean is the textbook's."""
  x = np.random.default_rng(0).normal(size=(10, 3))
  mean = Grouped()
  mean.add(x[:4], np.ones(4))
  mean.add(x[4:], np.ones(6))
  found = mean.estimate()
  half = stats.t.ppf(0.975, 9) * stats.sem(x)
  np.testing.assert_allclose(found.value, x.mean(0))
  np.testing.assert_allclose(found.low, x.mean(0) - half)
  np.testing.assert_allclose(found.high, x.mean(0) + half)


def test_intervals_of_a_function_of_the_mean_cover_it():
  """Of the ratio of two means, 95 of 100 times, with sequences of unequal weight."""
  rng, inside = np.random.default_rng(0), []
  for _ in range(400):
    weights = rng.integers(20, 60, 50)
    mean = Grouped()
    mean.add((rng.normal(2, 0.5, (50, 1)) * [1.0, 0.0] + rng.normal(4, 0.5, (50, 1)) * [0.0, 1.0]) * weights[:, None],
             weights)
    found = mean.estimate(lambda m: m[1] / m[0])
    inside.append(found.low <= 2.0 <= found.high)
  assert 0.92 < np.mean(inside) < 0.98


def test_one_sequence_has_no_interval():
  mean = Grouped()
  mean.add(np.ones((1, 2)), np.ones(1))
  found = mean.estimate()
  np.testing.assert_array_equal(found.value, 1.0)
  assert np.isnan(found.low).all() and np.isnan(found.high).all()
