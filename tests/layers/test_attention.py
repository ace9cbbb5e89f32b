"""Rotary positions, masks, what happens to queries and keys, and attention against numpy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax import config as config_lib
from lns_jax.layers import attention
from tiny import leaves_close, model, params


def ctx(T, segment_ids=None, **settings):
  tokens = jnp.zeros((1, T), jnp.int32)
  return attention.context(model(**settings), tokens, None if segment_ids is None else jnp.asarray([segment_ids]))


def test_rotary_is_half_split():
  q = jnp.zeros((1, 2, 1, 4)).at[..., 0].set(1.0)
  turned = attention.rotate(q, ctx(2, d_model=16, num_heads=4, num_kv_heads=4))
  np.testing.assert_allclose(turned[0, 1, 0], [0.5403023, 0, 0.8414710, 0], atol=1e-6)  # interleaved: 0.84 at index 1
  np.testing.assert_allclose(turned[0, 0, 0], [1, 0, 0, 0], atol=0)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_halves_are_turned_exactly_alike_on_every_platform(dtype):
  x = jax.random.normal(jax.random.key(0), (2, 3, 2, 8), dtype)
  ways = [jax.vjp(lambda x: attention.quarter_turn(x, platform).astype('float32'), x) for platform in ('cpu', 'tpu')]
  expected = np.concatenate([-np.asarray(x, 'float32')[..., 4:], np.asarray(x, 'float32')[..., :4]], axis=-1)
  for turned, pull in ways:
    np.testing.assert_array_equal(turned, expected)
    np.testing.assert_array_equal(pull(jnp.asarray(expected))[0], x)  # turned back


def test_positions_restart_at_each_segment():
  whole, parts = ctx(8), ctx(8, [1, 1, 1, 2, 2, 0, 0, 0])
  np.testing.assert_allclose(parts.cos_BTf[0], whole.cos_BTf[0][jnp.array([0, 1, 2, 0, 1, 0, 1, 2])], atol=0)


def test_a_query_sees_its_own_past_in_its_own_segment():
  seen = attention.mask(model(), ctx(5, [1, 1, 2, 2, 0]), 5, 1)[0]
  np.testing.assert_array_equal(seen, np.array([
      [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]], bool))
  np.testing.assert_array_equal(attention.mask(model(), ctx(4), 4, 1)[0], np.tril(np.ones((4, 4), bool)))


def test_a_window_counts_the_query_itself_and_stays_in_its_segment():
  seen = attention.mask(model(sliding_window=2), ctx(5, [1, 1, 1, 2, 2]), 5, 1)[0]
  np.testing.assert_array_equal(seen, np.array([
      [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]], bool))
  np.testing.assert_array_equal(attention.mask(model(sliding_window=1), ctx(4), 4, 1)[0], np.eye(4, dtype=bool))
  np.testing.assert_array_equal(
      attention.mask(model(sliding_window=4), ctx(4), 4, 1), attention.mask(model(), ctx(4), 4, 1))


def test_without_a_causal_mask_a_query_sees_its_whole_segment():
  seen = attention.mask(model(causal=False), ctx(4, [1, 1, 2, 2]), 4, 1)[0]
  np.testing.assert_array_equal(seen, np.kron(np.eye(2), np.ones((2, 2))).astype(bool))
  assert attention.mask(model(causal=False), ctx(3), 3, 1).all()


def test_clipping():
  np.testing.assert_array_equal(attention.clip(jnp.array([-3.0, 0.5, 9.0]), 2.0), [-2, 0.5, 2])
  x = jnp.array([-3.0, 0.5, 9.0])
  assert attention.clip(x, 0.0) is x


class Normed(nn.Module):
  """QK-norm as a module with parameters of its own."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_BTHh):
    return attention.qk_norm(self.config, 'q_norm', x_BTHh)


@pytest.mark.parametrize('kind, width, axes', [('head', 16, -1), ('full', 64, (-2, -1))])
def test_qk_norm_equals_numpy(kind, width, axes):
  rng = np.random.default_rng(0)
  q, gain = rng.normal(size=(2, 3, 4, 16)), rng.uniform(0.5, 1.5, width)
  module = Normed(model(qk_norm=kind, norm_eps=1e-3))
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros(q.shape))
  assert jax.tree.map(jnp.shape, nn.unbox(shapes)) == {'params': {'q_norm': {'gain': (width,)}}}
  expected = q / np.sqrt(np.mean(q**2, axis=axes, keepdims=True) + 1e-3) * gain.reshape(-1, 16)
  found = module.apply({'params': {'q_norm': {'gain': jnp.asarray(gain)}}}, jnp.asarray(q, jnp.float32))
  np.testing.assert_allclose(found, expected, atol=2e-6)


def attend_spied(config, p, x, monkeypatch):
  """(what enters the softmax: q, k, v; the output) of the attention sub-layer."""
  seen, real = [], attention.attend
  monkeypatch.setattr(attention, 'attend', lambda *a: seen.append(a[:3]) or real(*a))
  where = attention.context(config, jnp.zeros(x.shape[:2], jnp.int32), None)
  y = attention.Attention(config).apply({'params': p}, x, where, 1)
  return seen[0], y


@pytest.mark.parametrize('kind', ['head', 'full'])
def test_with_qk_norm_the_schemes_factor_reaches_the_values_only(kind, monkeypatch):
  # paper.md 4.8.5: 1/sqrt(l) on the input is undone in q and k, so that the output is 1/sqrt(l) times the other's
  config = model(qk_norm=kind, norm_eps=1e-12)
  p = params(config)['layers']['1']['attn']
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 64)), jnp.float32)
  (q, k, v), y = attend_spied(config, p, x, monkeypatch)
  scaled, y_scaled = attend_spied(config, p, x * 7 ** -0.5, monkeypatch)
  np.testing.assert_allclose(scaled[0], q, atol=2e-6)
  np.testing.assert_allclose(scaled[1], k, atol=2e-6)
  np.testing.assert_allclose(scaled[2], v * 7 ** -0.5, atol=2e-6)
  np.testing.assert_allclose(y_scaled, y * 7 ** -0.5, atol=5e-6)


def test_without_qk_norm_the_factor_reaches_the_scores(monkeypatch):
  config = model()
  p, x = params(config)['layers']['1']['attn'], jnp.ones((1, 8, 64))
  (q, _, _), _ = attend_spied(config, p, x, monkeypatch)
  (scaled, _, _), _ = attend_spied(config, p, x * 0.5, monkeypatch)
  np.testing.assert_allclose(scaled, q * 0.5, rtol=1e-6)


def test_biases_are_added_before_clipping(monkeypatch):
  config = model(bias='qkv', clip_qkv=0.25, head_dim=2)
  p = jax.tree.map(jnp.zeros_like, params(config)['layers']['1']['attn'])
  p['q_bias'] = jnp.arange(8.0) - 4  # [H * h], a head after the other
  p['v_bias'] = jnp.full(4, 0.125)
  (q, k, v), _ = attend_spied(config, p, jnp.ones((1, 1, 64)), monkeypatch)
  np.testing.assert_allclose(q[0, 0], [[-0.25, -0.25], [-0.25, -0.25], [0, 0.25], [0.25, 0.25]])
  assert not k.any() and (v == 0.125).all()


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


def test_the_mean_of_values_is_alike_on_every_platform():
  """Values and gradients of both orders of modes; the weights are no shares, and one query sees a single key."""
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    weights = jnp.asarray(rng.uniform(size=(2, 2, 3, 5, 7)))  # B K G T S
    weights, v = weights.at[:, :, :, 0, 1:].set(0), jnp.asarray(rng.normal(size=(2, 7, 2, 4)))
    shares = weights / weights.sum(-1, keepdims=True)
    expected = np.einsum('BKGTS,BSKh->BTKGh', shares, v).reshape(2, 5, 6, 4)
    plain = lambda w, v: attention.weigh(w / w.sum(-1, keepdims=True), v)
    tangents = jnp.cos(weights), jnp.sin(v)
    for platform in ('cpu', 'tpu'):
      found = lambda w, v: attention.mean(w, v, platform)
      np.testing.assert_allclose(found(weights, v), expected, atol=1e-12)
      leaves_close(jax.jvp(found, (weights, v), tangents), jax.jvp(plain, (weights, v), tangents), 1e-12)
      pulled = [jax.vjp(f, weights, v)[1](jnp.cos(expected)) for f in (found, plain)]
      leaves_close(*pulled, 1e-12)


@pytest.mark.parametrize('platform, T, h, column', [
    ('tpu', 5, 64, True), ('tpu', 5, 128, False), ('tpu', 1, 64, False), ('cpu', 5, 64, False)])
def test_on_a_tpu_the_divisor_is_a_column_of_the_product_where_there_is_room(platform, T, h, column):
  weights, v = jnp.ones((1, 2, 1, T, 7)), jnp.ones((1, 7, 2, h))
  text = str(jax.make_jaxpr(lambda w, v: attention.sums_and_total(w, v, platform))(weights, v))
  assert (text.count('concatenate'), text.count('reduce_sum')) == (int(column), int(not column))


def test_long_rows_in_parts_equal_whole_ones(monkeypatch):
  """Values and gradients, documents and grouped keys included; a future key would be seen in a part too many."""
  monkeypatch.setattr(attention, 'LONG', 16)
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    q, k, v = (jnp.asarray(rng.normal(size=(2, 16, heads, 8))) for heads in (4, 2, 2))
    ids = jnp.asarray(rng.integers(0, 2, (2, 16)).cumsum(1))
    mask = jnp.tril(jnp.ones((16, 16), bool)) & (ids[:, :, None] == ids[:, None])
    def total(f):
      return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(f(*x, mask))), (0, 1, 2))(q, k, v)
    leaves_close(total(attention.attend_behind), total(attention.attend), 1e-12)
    scores = jax.make_jaxpr(attention.attend_behind)(q, k, v, mask).eqns
    parts = [e.outvars[0].aval.shape[-2:] for e in scores if e.primitive.name == 'exp']
    assert parts == [(4, 4), (4, 8), (4, 12), (4, 16)]


def test_softmax_is_not_done_in_half_precision():
  q = jnp.full((1, 2, 1, 4), 30.0, jnp.float16)  # a score of 1800 overflows exp in any type; of 65504 the type itself
  out = attention.attend(q, q, jnp.ones_like(q), jnp.ones((1, 2, 2), bool))
  assert np.isfinite(out).all() and jax.numpy.allclose(out, 1)
