"""Losses are sums and weights; a masked target is never read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.models import loss


def test_uniform_logits_cost_the_log_of_the_vocabulary():
  found = loss.token_losses(jnp.zeros((1, 2, 32000)), jnp.array([[3, 31999]]), jnp.ones((1, 2)))
  np.testing.assert_allclose(found, 10.3734912, rtol=1e-6)


@pytest.mark.parametrize('ignored', [-100, -1, 10, 2**31 - 1])
def test_an_ignored_label_is_not_read(ignored):
  """Known fault S6: optax gives NaN for -100 and the last class for -1."""
  def total(logits):
    return jnp.sum(loss.token_losses(logits, jnp.array([[3, ignored]]), jnp.array([[1.0, 0.0]])))
  value, grad = jax.value_and_grad(total)(jnp.zeros((1, 2, 10)))
  assert float(value) == pytest.approx(2.3025851) and np.isfinite(grad).all() and (grad[0, 1] == 0).all()


@pytest.mark.parametrize('label', [-1, -100, 10])
def test_a_weighed_label_outside_of_the_vocabulary_is_never_a_number(label):
  """Known fault S6: -1 must not score as the last class (0.4586296)."""
  found = loss.token_losses(jnp.arange(10.0)[None, None], jnp.array([[label]]), jnp.ones((1, 1)))
  assert np.isnan(found).all()
  last = loss.token_losses(jnp.arange(10.0)[None, None], jnp.array([[9]]), jnp.ones((1, 1)))
  np.testing.assert_allclose(last, 0.4586296, rtol=1e-6)


def test_weights_are_real_tokens_or_as_given():
  batch = {'segment_ids': jnp.array([[1, 2, 0]])}
  np.testing.assert_array_equal(loss.weights(batch), [[1, 1, 0]])
  np.testing.assert_array_equal(loss.weights(batch | {'weights': jnp.array([[0.0, 1.0, 0.0]])}), [[0, 1, 0]])


def test_mean_of_nothing_is_zero():
  assert float(loss.mean(jnp.float32(0), jnp.float32(0))) == 0
  assert float(loss.mean(jnp.float32(7), jnp.float32(4))) == 1.75


@pytest.mark.parametrize('chunk', [1, 4, 5, 12, 100])
def test_chunks_change_neither_loss_nor_gradient(chunk):
  rng = np.random.default_rng(0)
  x, table = rng.normal(size=(3, 12, 8)), rng.normal(size=(50, 8))
  targets, w = rng.integers(0, 50, (3, 12)), rng.uniform(size=(3, 12)) * (rng.uniform(size=(3, 12)) > 0.3)
  targets[w == 0] = -100
  with jax.enable_x64(True):
    x, table, w = jnp.asarray(x), jnp.asarray(table), jnp.asarray(w, jnp.float32)  # as a float64 run has them
    def total(x, table, chunk):
      return 3 * loss.summed_loss(x, table, targets, w, chunk)
    expected, found = (jax.value_and_grad(total, (0, 1))(x, table, c) for c in (0, chunk))
    assert float(total(x, table, chunk)) == pytest.approx(float(expected[0]), rel=1e-12)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_bf16_chunks_keep_the_types():
  x, table = jnp.ones((2, 8, 4), jnp.bfloat16), jnp.ones((10, 4), jnp.float32)
  value, (dx, dt) = jax.value_and_grad(lambda x, t: loss.summed_loss(x, t, jnp.ones((2, 8), int), jnp.ones((2, 8)), 4),
                                       (0, 1))(x, table)
  assert value.dtype == jnp.float32 and dx.dtype == jnp.bfloat16 and dt.dtype == jnp.float32
