"""RMSNorm: values by hand, and statistics that half precision does not spoil."""

import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.layers.norms import RMSNorm, times
from tiny import model


def norm(x, factor=1.0, gain=None, eps=1e-12):
  gain = jnp.ones(np.shape(x)[-1]) if gain is None else jnp.asarray(gain, jnp.float32)
  return RMSNorm(model(norm_eps=eps)).apply({'params': {'gain': gain}}, jnp.asarray(x), factor)


def test_by_hand():
  np.testing.assert_allclose(norm([3.0, 4.0]), [0.8485281, 1.1313708], rtol=1e-6)
  np.testing.assert_allclose(norm([3.0, 4.0], 4 ** -0.5), [0.4242641, 0.5656854], rtol=1e-6)
  np.testing.assert_allclose(norm([3.0, 4.0], gain=[2.0, 0.5]), [1.6970563, 0.5656854], rtol=1e-6)


@pytest.mark.parametrize('l', [1, 2, 3, 7])
def test_mean_square_of_an_lns_output_is_one_over_l(l):
  y = norm(np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32), float(l) ** -0.5)
  np.testing.assert_allclose(np.mean(np.square(y), axis=-1), 1 / l, rtol=1e-5)


def test_eps_is_added_to_the_mean_square():
  np.testing.assert_allclose(norm([1e-3, -1e-3], eps=1e-6), [0.70710678, -0.70710678], rtol=1e-5)


def test_half_precision_does_not_overflow():
  np.testing.assert_allclose(norm(np.array([300, -300], np.float16)), [1, -1], atol=1e-3)
  np.testing.assert_allclose(norm(np.full(4096, 40, np.float16)), np.ones(4096), atol=1e-3)


def test_bf16_is_rounded_once():
  x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 96)), jnp.bfloat16)
  gain = np.random.default_rng(2).uniform(0.5, 1.5, 96)
  exact = norm(x.astype(jnp.float32), 7 ** -0.5, gain)
  assert norm(x, 7 ** -0.5, gain).dtype == jnp.bfloat16
  np.testing.assert_array_equal(norm(x, 7 ** -0.5, gain), exact.astype(jnp.bfloat16))


def test_a_factor_on_bf16_is_rounded_once():
  x = jnp.asarray([1.0, 3.0, 5.0], jnp.bfloat16)
  np.testing.assert_array_equal(times(x, 7 ** -0.5), (x.astype(jnp.float32) * 7 ** -0.5).astype(jnp.bfloat16))
  assert times(x, 1.0) is x
