"""Rotary positions, masks and attention against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.layers import attention
from tiny import model


def ctx(T, segment_ids=None, **settings):
  tokens = jnp.zeros((1, T), jnp.int32)
  return attention.context(model(**settings), tokens, None if segment_ids is None else jnp.asarray([segment_ids]))


def test_rotary_is_half_split():
  q = jnp.zeros((1, 2, 1, 4)).at[..., 0].set(1.0)
  turned = attention.rotate(q, ctx(2, d_model=16, num_heads=4, num_kv_heads=4))
  np.testing.assert_allclose(turned[0, 1, 0], [0.5403023, 0, 0.8414710, 0], atol=1e-6)  # interleaved: 0.84 at index 1
  np.testing.assert_allclose(turned[0, 0, 0], [1, 0, 0, 0], atol=0)


def test_positions_restart_at_each_segment():
  whole, parts = ctx(8), ctx(8, [1, 1, 1, 2, 2, 0, 0, 0])
  np.testing.assert_allclose(parts.cos_BTf[0], whole.cos_BTf[0][jnp.array([0, 1, 2, 0, 1, 0, 1, 2])], atol=0)


def test_a_query_sees_its_own_past_in_its_own_segment():
  seen = attention.mask(model(), ctx(5, [1, 1, 2, 2, 0]), 5)[0]
  np.testing.assert_array_equal(seen, np.array([
      [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]], bool))
  np.testing.assert_array_equal(attention.mask(model(), ctx(4), 4)[0], np.tril(np.ones((4, 4), bool)))


@pytest.mark.parametrize('K', [1, 2, 4])
def test_grouped_attention_equals_numpy(K):
  rng = np.random.default_rng(0)
  B, T, H, h = 2, 6, 4, 8
  q, k, v = rng.normal(size=(B, T, H, h)), rng.normal(size=(B, T, K, h)), rng.normal(size=(B, T, K, h))
  mask = np.tril(np.ones((T, T), bool))[None]
  expected = np.zeros((B, T, H, h))
  for b in range(B):
    for head in range(H):
      kv = head // (H // K)
      scores = np.where(mask[0], q[b, :, head] @ k[b, :, kv].T / np.sqrt(h), -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      expected[b, :, head] = weights / weights.sum(-1, keepdims=True) @ v[b, :, kv]
  found = attention.attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(mask))
  np.testing.assert_allclose(found, expected, atol=2e-6)


def test_softmax_is_not_done_in_half_precision():
  q = jnp.full((1, 2, 1, 4), 30.0, jnp.float16)  # a score of 1800 overflows exp in any type; of 65504 the type itself
  out = attention.attend(q, q, jnp.ones_like(q), jnp.ones((1, 2, 2), bool))
  assert np.isfinite(out).all() and jax.numpy.allclose(out, 1)
