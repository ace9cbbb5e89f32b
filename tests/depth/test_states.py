"""Angles, variances and their traps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax import depth, sharding
from lns_jax.config import MeshConfig
from lns_jax.depth import states
from lns_jax.errors import UserError
from lns_jax.models import transformer
from lns_jax.train import stats
from tiny import batch, model, params


def angle(u, v):
  (a, ok_a), (b, ok_b) = states.unit(jnp.asarray(u)), states.unit(jnp.asarray(v))
  assert ok_a and ok_b
  return float(states.distance(a, b)[0])


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_vector_is_at_no_distance_from_itself(dtype):
  """Known fault D1: a rounded cosine above 1 makes arccos NaN."""
  assert angle(jnp.arange(6, dtype=dtype), jnp.arange(6, dtype=dtype)) <= 1e-6
  x = jax.random.normal(jax.random.key(0), (1000, 64), dtype)
  u, _ = states.unit(x)
  assert float(states.distance(u, u)[0].max()) == 0.0


def test_opposite_is_exactly_one_and_orthogonal_a_half():
  assert angle([1.0, 1.0], [-1.0, -1.0]) == 1.0
  assert angle([1.0, 0.0], [0.0, 2.0]) == pytest.approx(0.5, abs=1e-7)


@pytest.mark.parametrize('small', [1e-1, 1e-3, 1e-5])
def test_small_angles_are_right_to_one_percent(small):
  """arccos of a float32 cosine sees nothing below 3e-4."""
  rng = np.random.default_rng(0)
  a = rng.normal(size=64)
  b = rng.normal(size=64)
  b -= a * (a @ b) / (a @ a)
  b *= np.linalg.norm(a) / np.linalg.norm(b)
  turned = np.cos(small) * a + np.sin(small) * b
  assert angle(a.astype(np.float32), turned.astype(np.float32)) == pytest.approx(small / np.pi, rel=0.01)


def test_huge_and_tiny_vectors_have_directions():
  assert angle(np.float32([3e30, 0]), np.float32([0, 1e-30])) == pytest.approx(0.5)


def test_a_zero_vector_is_left_out_and_counted():
  """Known fault D10: tokens [0, 0] and [1, 0] against [0, 1], [0, 1] are 0.5 from one of two tokens."""
  stream = jnp.array([[[[0.0, 0.0], [1.0, 0.0]]], [[[0.0, 1.0], [0.0, 1.0]]]])
  angles, influences, counts = states.all_pairs(stream, jnp.ones((1, 2)))
  assert counts[0, 0, 0] == 1 and angles[0, 0, 0] == pytest.approx(0.5) and influences[0, 0, 0] == pytest.approx(1.0)


def test_only_zero_vectors_are_an_error():
  config = model()
  p = jax.tree.map(jnp.zeros_like, params(config))
  with pytest.raises(UserError, match='no valid tokens'):
    depth.profile(config, p, [batch()])


@pytest.mark.parametrize('L, loop', [(2, 'unrolled'), (4, 'unrolled'), (40, 'scan')])
def test_cells_of_the_map(L, loop):
  """Known fault D5: n = 1..L give L, L - 1, ... cells; the rest is masked, never 0."""
  config = model(num_layers=L, loop=loop)
  p, b = params(config), batch()
  found = depth.angular(config, p, [b])
  assert found.value.shape == (L, L)
  for n in range(1, L + 1):
    assert np.isfinite(found.value[n - 1]).sum() == L + 1 - n
    assert np.isnan(found.value[n - 1, L + 1 - n:]).all()
  s = np.asarray(transformer.states(config, p, b['tokens'], segment_ids=b['segment_ids']), np.float64)
  real = b['segment_ids'] > 0
  unit = s / np.linalg.norm(s, axis=-1, keepdims=True)
  for n in range(1, L + 1):
    for l in range(1, L + 2 - n):
      cosine = np.sum(unit[l - 1] * unit[l - 1 + n], -1)[real]
      assert found.value[n - 1, l - 1] == pytest.approx(np.mean(np.arccos(cosine)) / np.pi, rel=1e-4)
  influence = depth.block_influence(config, p, [b]).value
  expected = [np.mean(1 - np.sum(unit[l] * unit[l + 1], -1)[real]) for l in range(L)]
  np.testing.assert_allclose(influence, expected, rtol=1e-3)


def test_variance_is_over_hidden_units_with_ddof_0_and_without_padding():
  config, b = model(scheme='lns'), batch()
  p = params(config)
  s = np.asarray(transformer.states(config, p, b['tokens'], segment_ids=b['segment_ids']), np.float64)
  expected = np.var(s, axis=-1)[:, b['segment_ids'] > 0].mean(-1)
  found = depth.variance(config, p, [b])
  np.testing.assert_allclose(found.value, expected, rtol=1e-5)
  assert (found.low <= found.value).all() and (found.value <= found.high).all()
  assert found.tokens == (b['segment_ids'] > 0).sum()


def test_twice_the_same_examples_change_no_mean():
  config, b = model(), batch()
  p = params(config)
  once, twice = depth.profile(config, p, [b]), depth.profile(config, p, [b, b])
  for name in once:
    np.testing.assert_allclose(twice[name].value, once[name].value, rtol=1e-6)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_a_block_that_does_nothing_is_at_no_distance(loop):
  config = model(num_layers=3, loop=loop)
  p = params(model(num_layers=3))
  p['layers']['2']['attn']['o'] *= 0
  p['layers']['2']['mlp']['down'] *= 0
  from lns_jax.models import layout
  found = depth.profile(config, layout.native(p, config), [batch()])
  assert found['angular'].value[0, 1] == 0.0 and found['block_influence'].value[1] == 0.0


def test_a_state_that_is_not_finite_names_layer_sequence_and_token():
  """Of finite weights, whose products are not; padding is not looked at."""
  config, b = model(num_layers=3), batch(rows=2)
  b['segment_ids'][0] = b['segment_ids'][1, :3] = 0
  p = params(config)
  for name in ('gate', 'up'):
    p['layers']['2']['mlp'][name] *= 1e30
  with pytest.raises(UserError, match='the output of layer 2 is not finite at token 3 of sequence 3.'):
    depth.variance(config, p, [{k: 0 * v for k, v in b.items()}, b])
  p['layers']['3']['attn']['q'] = p['layers']['3']['attn']['q'].at[0, 0, 0].set(jnp.nan)
  with pytest.raises(UserError, match='the weight layers/3/attn/q is not finite'):
    depth.variance(config, p, [b])


@pytest.mark.parametrize('hidden, expected', [
    ([300.0, -300.0], 9e4), ([60000.0, -60000.0], 3.6e9), ([1.0, 2.0, 3.0, 4.0], 1.25)])
def test_half_precision_variance_does_not_overflow(hidden, expected):
  """Known fault D7: in what `depth` measures and in what training logs."""
  x = jnp.asarray([[hidden]], jnp.float16)
  kept = stats.read({'out': x})
  for found in (states.hidden_variance(x)[0, 0], kept['variance'][0, 0]):
    assert found.dtype == jnp.float32 and float(found) == pytest.approx(expected, rel=1e-5)


def test_no_batches_is_an_error():
  with pytest.raises(UserError, match='no batches'):
    depth.profile(model(), params(model()), [])


def numpy_cosine(a, b):
  return np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


@pytest.mark.parametrize('scheme, a, tokens', [
    ('branch_lns', 1.0, 'all'), ('branch_lns', 1.0, 'last'), ('deepnorm', (2 * 3) ** 0.25, 'all'), ('post', 1.0, 'all')])
def test_ratios_and_cosines_are_of_what_is_added_and_what_it_is_added_to(scheme, a, tokens):
  config, b = model(scheme=scheme, num_layers=3), batch()
  p = params(config)
  found = depth.profile(config, p, [b], tokens=tokens)
  _, out = transformer.apply(config, p, b, taps=['layers/*/*'])
  out = {k: np.asarray(v, np.float64) for k, v in out.items()}
  real = b['segment_ids'] > 0
  if tokens == 'last':
    real = real & (np.cumsum(real[:, ::-1], 1)[:, ::-1] == 1)
    assert (real.sum(1) == 1).all()
  for i, l in enumerate(config.layer_ids):
    x = {sub: a * out[f'layers/{l}/{sub}_x'] for sub in ('attn', 'mlp')} | {'layer': out[f'layers/{l}/attn_x']}
    added = {sub: out[f'layers/{l}/{sub}_branch'] for sub in ('attn', 'mlp')}
    for sub in added:
      ratio = np.sqrt(np.sum(added[sub][real] ** 2) / np.sum(x[sub][real] ** 2))
      assert found[f'{sub}_ratio'].value[i] == pytest.approx(ratio, rel=1e-5)
    for name, branch in (added | {'layer': out[f'layers/{l}/out'] - x['layer']}).items():
      expected = numpy_cosine(branch, x[name])[real].mean()
      assert found[f'{name}_cosine'].value[i] == pytest.approx(expected, abs=2e-6)
    variance = np.var(out[f'layers/{l}/out'], axis=-1)[real].mean()
    assert found['variance'].value[i + 1] == pytest.approx(variance, rel=1e-5)


def test_stages_measure_what_one_device_does():
  config, b = model(loop='scan', d_model=16, d_ff=32, num_layers=4), batch(T=8)
  p, mesh = params(config), sharding.make_mesh(MeshConfig(data=2, stage=4))
  expected = depth.profile(config, p, [b])
  with sharding.use(mesh):
    found = depth.profile(config, jax.device_put(p, sharding.params(mesh, config)), [b])
  for name in expected:
    np.testing.assert_allclose(found[name].value, expected[name].value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_another_choice_of_tokens_is_refused():
  with pytest.raises(UserError, match='one of all, last'):
    depth.profile(model(), params(model()), [batch()], tokens='first')
