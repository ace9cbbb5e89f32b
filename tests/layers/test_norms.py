"""Norms: values by hand, and statistics that half precision and a large mean do not spoil."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.layers.norms import Norm, times
from tiny import model


def norm(x, factor=1.0, gain=None, eps=1e-12, kind='rmsnorm', groups=1, **other):
  D = np.shape(x)[-1]
  params = {'gain': jnp.ones(D) if gain is None else jnp.asarray(gain, jnp.float32), 'bias': jnp.zeros(D), **other}
  wanted = {'rmsnorm': ['gain'], 'layernorm': ['gain', 'bias'], 'nonparametric_layernorm': [],
            'dyt': ['alpha', 'gain', 'bias']}[kind]
  module = Norm(model(norm_eps=eps, norm=kind), groups)
  return module.apply({'params': {k: params[k] for k in wanted}}, jnp.asarray(x), factor)


def test_by_hand():
  """Known fault N3."""
  np.testing.assert_allclose(norm([3.0, 4.0]), [0.8485281, 1.1313708], rtol=1e-6)
  np.testing.assert_allclose(norm([3.0, 4.0], 4 ** -0.5), [0.4242641, 0.5656854], rtol=1e-6)
  np.testing.assert_allclose(norm([3.0, 4.0], gain=[2.0, 0.5]), [1.6970563, 0.5656854], rtol=1e-6)


@pytest.mark.parametrize('kind', ['layernorm', 'nonparametric_layernorm'])
def test_layernorm_by_hand(kind):
  """(1, 2, 3, 4) has mean 2.5 and variance 1.25; known fault I11: what eps is added to."""
  expected = np.array([-1.3416408, -0.4472136, 0.4472136, 1.3416408])
  np.testing.assert_allclose(norm([1.0, 2, 3, 4], kind=kind), expected, rtol=1e-6)
  np.testing.assert_allclose(norm([1.0, 2, 3, 4], 0.5, kind=kind), expected / 2, rtol=1e-6)
  np.testing.assert_allclose(norm([1e-3, -1e-3], eps=1e-12, kind=kind), [0.9999995, -0.9999995], rtol=1e-6)
  np.testing.assert_allclose(norm([1e-3, -1e-3], eps=1e-5, kind=kind), [0.3015113, -0.3015113], rtol=1e-6)


def test_deepnorm_side_check_with_layernorm():
  """Known fault N4: LN(alpha x + f(x)) for L = 12, x = 1..4, f(x) = 5 - x; alpha on f gives the opposite signs."""
  x = np.array([1.0, 2, 3, 4])
  right = norm(2.2133638 * x + (5 - x), kind='layernorm')
  np.testing.assert_allclose(right, [-1.3416408, -0.4472136, 0.4472136, 1.3416408], rtol=1e-5)
  np.testing.assert_allclose(norm(x + 2.2133638 * (5 - x), kind='layernorm'), -right, rtol=1e-5)


def test_the_factor_is_on_the_whole_output_of_a_norm_with_bias():
  bias, gain = jnp.asarray([1.0, -2.0]), [2.0, 3.0]
  np.testing.assert_allclose(norm([3.0, 5.0], 0.5, gain, kind='layernorm', bias=bias), [-0.5, 0.5], rtol=1e-6)
  y = norm([1.0, -2.0], 0.5, gain, kind='dyt', alpha=jnp.float32(0.5), bias=bias)
  np.testing.assert_allclose(y, 0.5 * (np.array(gain) * np.tanh([0.5, -1.0]) + bias), rtol=1e-6)


def test_a_large_mean_does_not_cancel_in_layernorm():
  """mean(x^2) - mean(x)^2 in float32 would be 0 or negative here."""
  noise = np.random.default_rng(0).normal(size=256)
  x = np.asarray(30000 + noise, np.float32)
  exact = (x.astype(np.float64) - x.astype(np.float64).mean()) / x.astype(np.float64).std()
  np.testing.assert_allclose(norm(x, kind='layernorm'), exact, atol=4e-3)  # neighbours of 30000 are 2e-3 apart
  assert np.var(norm(x, kind='layernorm')) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize('kind', ['rmsnorm', 'layernorm'])
def test_groups_are_normed_each_for_itself(kind):
  x = np.random.default_rng(1).normal(size=(3, 12)).astype(np.float32) * np.repeat([1, 10, 100], 4)
  whole = norm(x, 0.5, kind=kind, groups=3)
  for g in range(3):
    np.testing.assert_allclose(whole[:, 4 * g:4 * g + 4], norm(x[:, 4 * g:4 * g + 4], 0.5, kind=kind), rtol=2e-5)


@pytest.mark.parametrize('l', [1, 2, 3, 7])
def test_mean_square_of_an_lns_output_is_one_over_l(l):
  y = norm(np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32), float(l) ** -0.5)
  np.testing.assert_allclose(np.mean(np.square(y), axis=-1), 1 / l, rtol=1e-5)


def test_eps_is_added_to_the_mean_square():
  np.testing.assert_allclose(norm([1e-3, -1e-3], eps=1e-6), [0.70710678, -0.70710678], rtol=1e-5)


@pytest.mark.parametrize('kind', ['rmsnorm', 'layernorm', 'nonparametric_layernorm'])
def test_half_precision_does_not_overflow(kind):
  """Known fault N10."""
  np.testing.assert_allclose(norm(np.array([300, -300], np.float16), kind=kind), [1, -1], atol=1e-3)
  x = np.full(4096, 40, np.float16) * np.where(np.arange(4096) % 2, 1, 1 if kind == 'rmsnorm' else -1)
  np.testing.assert_allclose(norm(x.astype(np.float16), kind=kind), x / 40, atol=1e-3)


@pytest.mark.parametrize('kind', ['rmsnorm', 'layernorm', 'nonparametric_layernorm', 'dyt'])
def test_bf16_is_rounded_once(kind):
  x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 96)), jnp.bfloat16)
  gain, alpha = np.random.default_rng(2).uniform(0.5, 1.5, 96), jnp.float32(0.7)
  exact = norm(x.astype(jnp.float32), 7 ** -0.5, gain, kind=kind, alpha=alpha)
  found = norm(x, 7 ** -0.5, gain, kind=kind, alpha=alpha)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_a_factor_on_bf16_is_rounded_once():
  x = jnp.asarray([1.0, 3.0, 5.0], jnp.bfloat16)
  np.testing.assert_array_equal(times(x, 7 ** -0.5), (x.astype(jnp.float32) * 7 ** -0.5).astype(jnp.bfloat16))
  assert times(x, 1.0) is x


@pytest.mark.parametrize('kind', ['rmsnorm', 'layernorm'])
def test_before_the_norm_a_factor_only_meets_eps(kind):
  """lns_before is pre as eps goes to 0 (Table 8's 26.97 against 26.73 is the paper's noise)."""
  x = np.random.default_rng(3).normal(size=(4, 32)).astype(np.float32) * 1e-2
  apart = [np.abs(np.asarray(norm(x / 4, kind=kind, eps=eps) - norm(x, kind=kind, eps=eps))).max()
           for eps in (1e-6, 1e-12)]
  assert apart[0] > 0.1 and apart[1] < 1e-5


def test_a_layernorm_has_a_finite_gradient_at_a_constant_input():
  g = jax.grad(lambda x: norm(x, kind='layernorm', eps=1e-6).sum())(jnp.full(8, 3.0))
  assert np.isfinite(g).all()
