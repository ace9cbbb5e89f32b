"""Norms and singular values from products, against matrices that exist."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.depth import spectral
from lns_jax.errors import UserError


def of(matrices):
  """[B, n, n] as a map of [B, n, 1]."""
  a = jnp.asarray(matrices, jnp.float32)
  dot = lambda a, v: jnp.einsum('Bij,Bjk->Bik', a, v, precision='highest')
  return spectral.Linear(lambda v: dot(a, v), lambda u: dot(jnp.swapaxes(a, 1, 2), u))


def start(B, n):
  return np.random.default_rng(7).normal(size=(B, n, 1)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(2,))
def bidiagonal(matrices, start, iterations, share=0.0):
  return spectral.bidiagonal(of(matrices).less(share), start, iterations)


def singular(*args):
  return spectral.singular(bidiagonal(*args))


def test_the_largest_singular_value_is_that_of_the_matrix():
  a = np.random.default_rng(0).normal(size=(3, 40, 40))
  found = singular(a, start(3, 40), 40)
  expected = np.linalg.svd(a, compute_uv=False)
  np.testing.assert_allclose(found.largest, expected[:, 0], rtol=1e-5)
  rest = singular(a, start(3, 40), 40, 1.0)
  np.testing.assert_allclose(rest.largest, np.linalg.svd(a - np.eye(40), compute_uv=False)[:, 0], rtol=1e-5)


def test_a_singular_value_lies_within_the_residual():
  """Whatever the number of iterations, and from below."""
  a = np.random.default_rng(1).normal(size=(8, 60, 60))
  exact = np.linalg.svd(a, compute_uv=False)
  for iterations in (1, 4, 16):
    found = singular(a, start(8, 60), iterations)
    largest, residual = np.asarray(found.largest, np.float64), np.asarray(found.residual, np.float64)
    nearest = np.abs(exact - largest[:, None]).min(axis=1)
    assert (nearest <= residual * largest + 1e-5).all() and (largest <= exact[:, 0] * (1 + 1e-6)).all()
  assert (residual < 0.05).all()


def test_it_is_nowhere_further_off_than_power_iteration():
  a = np.random.default_rng(2).normal(size=(8, 60, 60))
  v = np.asarray(start(8, 60), np.float64)
  for iterations in range(1, 4):
    power = np.linalg.norm(a @ v, axis=1)[:, 0] / np.linalg.norm(v, axis=1)[:, 0]
    assert (singular(a, start(8, 60), iterations).largest >= power * (1 - 1e-5)).all()
    v = a.swapaxes(1, 2) @ a @ v


def test_maps_that_end_the_search_early():
  """Of the identity, of nothing and of rank one, one or two products tell all; what follows must not spoil it."""
  n = 300
  thin = np.zeros((n, n))
  thin[3, 5] = 3.0
  found = singular(np.stack([np.eye(n), np.zeros((n, n)), thin]), start(3, n), 20)
  np.testing.assert_allclose(found.largest, [1.0, 0.0, 3.0], rtol=1e-5)
  np.testing.assert_allclose(found.quantiles, [[1.0] * 5, [0.0] * 5, [0.0] * 5], atol=1e-5)
  assert found.largest[1] == 0.0 and (found.residual < 1e-5).all()


def test_quantiles_are_those_of_all_singular_values():
  """Of a diagonal the singular values are known: evenly spread over 0..2, or all but a few near 1."""
  n = 4000
  even = np.linspace(0, 2, n)
  near = 1 + 0.05 * np.random.default_rng(0).normal(size=n)
  near[:3] = 50.0
  d = jnp.asarray(np.stack([even, near]), jnp.float32)[..., None]
  scaled = spectral.Linear(lambda v: d * v, lambda u: d * u)
  found = spectral.singular(jax.jit(lambda v: spectral.bidiagonal(scaled, v, 30))(start(2, n))).quantiles
  np.testing.assert_allclose(found[0], np.quantile(even, spectral.LEVELS), atol=0.1)
  np.testing.assert_allclose(found[1], np.quantile(near, spectral.LEVELS), atol=0.02)


def test_of_a_map_that_is_not_finite_nothing_is_known_and_of_others_all_is():
  a = np.random.default_rng(0).normal(size=(2, 5, 5))
  a[1, 2, 2] = np.nan
  found = singular(a, start(2, 5), 5)
  assert found.largest[0] == pytest.approx(np.linalg.norm(a[0], 2), rel=1e-5)
  assert all(np.isnan(v[1]).all() and np.isfinite(v[0]).all() for v in found)


def test_enough_probes_make_quadratic_forms_exact_and_fewer_unbiased():
  n, B = 24, 4000
  a = np.random.default_rng(0).normal(size=(n, n))
  flips = jax.random.rademacher(jax.random.key(0), (B, n), jnp.float32)
  form = lambda z: jnp.einsum('Bi,ij,Bj->B', z, jnp.asarray(a, jnp.float32), z, precision='highest')
  errors = {}
  for m in (1, 4, 32):
    found = jax.jit(spectral.mean_over_probes, static_argnums=(0, 2))(form, flips, m)
    found = np.asarray(found, np.float64) - np.trace(a)
    errors[m] = found.std()
    assert abs(found.mean()) <= 4 * found.std() / np.sqrt(B) + 1e-5
  assert errors[32] < 1e-4 < errors[4] < 0.7 * errors[1]
  assert [spectral.enough(m, 24) for m in (1, 16, 32, 64)] == [1, 16, 32, 32]


def test_probes_are_a_power_of_two():
  spectral.check_probes(1)
  spectral.check_probes(64)
  with pytest.raises(UserError, match='probes is 12, but must be a power of two, such as 8 or 16'):
    spectral.check_probes(12)
  with pytest.raises(UserError, match='probes is 0'):
    spectral.check_probes(0)
