"""Linear replaceability against numpy's least squares, against a naive forward pass, and of a layer that is linear."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax import depth
from lns_jax.config import ModelConfig
from lns_jax.depth.linear import NormalEquations, replaceability
from lns_jax.errors import UserError
from lns_jax.layers import attention, block
from lns_jax.models import layout, loss, transformer
from tiny import batch, model, params, rebuilt

STATES = jax.jit(lns_jax.states, static_argnums=0)
SMALL = dict(vocab_size=40, d_model=8, d_ff=16, num_heads=2, num_kv_heads=1, num_layers=3)


def test_the_normal_equations_give_what_least_squares_gives():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(60, 6)) * 10.0 ** np.arange(-2, 4) + 5, rng.normal(size=(60, 6))
  equations = NormalEquations(6)
  for part in np.array_split(np.arange(60), 7):
    equations.add(x[part].astype(np.float32), y[part])
  x = x.astype(np.float32).astype(np.float64)
  right, *_ = np.linalg.lstsq(np.pad(x, [(0, 0), (0, 1)], constant_values=1), y)
  slope, intercept, mean = equations.solve(ridge=0)
  np.testing.assert_allclose(slope, right[:-1], rtol=1e-6, atol=1e-9)
  np.testing.assert_allclose(intercept, right[-1], rtol=1e-6)
  np.testing.assert_allclose(mean, y.mean(axis=0))
  assert equations.tokens == 60


def test_constant_units_and_copies_are_harmless():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(50, 4))
  x[:, 1], x[:, 2] = 1e4 + 0.1, 3 * x[:, 0]
  y = x @ rng.normal(size=(4, 4)) + 2
  equations = NormalEquations(4)
  equations.add(x, y)
  slope, intercept, _ = equations.solve()
  assert np.abs(slope).max() < 10 and (slope[1] == 0).all()
  np.testing.assert_allclose(x @ slope + intercept, y, atol=1e-4)


def naive(config, p, fit, check):
  """(loss, rises [L], R^2 [L]): lstsq on the rows `fit`, every layer replaced in turn by hand on the rows `check`."""
  def forward(b):
    return np.asarray(STATES(config, p, b['tokens'], segment_ids=b['segment_ids'])), b['segment_ids'] > 0
  @functools.partial(jax.jit, static_argnums=0)
  def run(position, b, x):
    ctx = attention.context(config, x, b['segment_ids'])
    for l in config.layer_ids[position:]:
      x = block.Block(config).apply({'params': layout.unstack(p)['layers'][str(l)]}, x, ctx, l)[0]
    w = loss.weights(b)
    return jnp.sum(loss.token_losses(transformer.head(config, p, x), b['targets'], w)) / jnp.sum(w)
  (states, real), (other, real_other) = forward(fit), forward(check)
  base, rises, r2 = float(run(config.num_layers, check, other[-1])), [], []
  for l in range(config.num_layers):
    x, y = states[l][real].astype(np.float64), (states[l + 1] - states[l])[real].astype(np.float64)
    w, *_ = np.linalg.lstsq(np.pad(x, [(0, 0), (0, 1)], constant_values=1), y)
    predicted = other[l] @ w[:-1] + w[-1]
    rises.append(float(run(l + 1, check, jnp.asarray(other[l] + predicted, jnp.float32))) - base)
    actual = other[l + 1] - other[l]
    error, spread = ((v[real_other] ** 2).sum() for v in (actual - predicted, actual - y.mean(axis=0)))
    r2.append(1 - error / spread)
  return base, np.array(rises), np.array(r2)


def rows(b, part):
  return {k: v[part::2] for k, v in b.items()}


@pytest.mark.parametrize('changes, split', [
    (dict(loop='scan', scheme='mix', mix_fraction=0.5), lambda b: [b]),  # every other row of an only batch
    pytest.param(dict(scheme='lns', layer_ids=(1, 4, 5), depth=6), lambda b: [rows(b, 0), rows(b, 1)],
                 marks=pytest.mark.slow)], ids=['mix', 'lns'])
def test_each_layer_is_replaced_by_the_fit_of_the_other_half(changes, split):
  config = rebuilt(model(**SMALL), **changes)
  p, b = params(config), batch(vocab=40, rows=16)
  base, rises, r2 = naive(config, p, rows(b, 0), rows(b, 1))
  found = replaceability(config, p, split(b))
  assert float(found['linear_baseline'].value) == pytest.approx(base, rel=1e-6)
  np.testing.assert_allclose(found['linear_rise'].value, rises, atol=2e-5)
  np.testing.assert_allclose(found['linear_r2'].value, r2, atol=1e-4)
  assert float(found['usefulness'].value) == np.mean(rises > 0.1 * base)
  assert found['linear_baseline'].tokens == (rows(b, 1)['segment_ids'] > 0).sum()


def test_a_layer_that_is_linear_is_replaced_at_no_loss():
  """Equal lengths make RMSNorm a scale, and where its input is large the GELU is the identity."""
  config = model(**SMALL | dict(num_layers=2, num_heads=2, num_kv_heads=2), mlp='gelu', bias='all')
  p, b = params(config), batch(vocab=40, rows=24)
  table = np.asarray(p['embed']['table'])
  p['embed']['table'] = jnp.asarray(table / np.linalg.norm(table, axis=1, keepdims=True))
  p['layers']['1']['attn'] |= {'o': 0 * p['layers']['1']['attn']['o'], 'o_bias': 0 * p['layers']['1']['attn']['o_bias']}
  p['layers']['1']['mlp']['up_bias'] += 10
  p['head']['table'] *= 30
  found = replaceability(config, p, [b])
  assert found['linear_r2'].value[0] > 1 - 1e-5 and abs(found['linear_rise'].value[0]) < 1e-4
  assert abs(depth.layer_drop(config, p, [b])['layer_drop'].value[0]) > 0.1
  assert found['linear_r2'].value[1] < 0.999


def test_a_layer_that_adds_nothing_costs_nothing_and_has_no_r2():
  config = model(**SMALL, loop='scan')
  p = layout.unstack(params(config))
  for sub, matrix in (('attn', 'o'), ('mlp', 'down')):
    p['layers']['2'][sub][matrix] *= 0
  found = replaceability(config, layout.native(p, config), [batch(vocab=40), batch(vocab=40, seed=1)])
  assert abs(found['linear_rise'].value[1]) < 1e-6 and np.isnan(found['linear_r2'].value[1])
  assert np.isfinite(found['linear_r2'].value[[0, 2]]).all()


def test_classes_of_images():
  config = ModelConfig(family='vit', causal=False, norm='layernorm', bias='all', mlp='gelu', image_size=4,
                       patch_size=2, channels=1, num_classes=4, d_model=8, d_ff=16, num_layers=2, num_heads=2,
                       init_std=0.2)
  rng = np.random.default_rng(0)
  b = {'images': rng.standard_normal((8, 4, 4, 1)).astype(np.float32), 'labels': rng.integers(0, 4, 8),
       'weights': np.float32([1, 1, 1, 1, 1, 1, 0, 0])}
  p = transformer.init(config, jax.random.key(0))
  found = replaceability(config, p, [b])
  even = {k: v[1:6:2] for k, v in b.items()}
  assert found['linear_baseline'].tokens == 3
  assert found['linear_baseline'].value == pytest.approx(float(depth.layer_drop(config, p, [even])['baseline'].value))
  assert np.isfinite(found['linear_rise'].value).all()


def test_a_sample_that_is_too_small_is_refused():
  config = model(**SMALL)
  p, b = params(config), batch(vocab=40, rows=1, T=8, segments=False)
  with pytest.raises(UserError, match='8 units is fitted on 9 real tokens or more.*has 8'):
    replaceability(config, p, [b, b])
  with pytest.raises(UserError, match='list .* not an iterator'):
    replaceability(config, p, iter([b, b]))
  longer = batch(vocab=40, rows=1, segments=False)
  with pytest.raises(UserError, match='no sequence is held out'):
    replaceability(config, p, [longer])


def test_a_weight_that_is_not_finite_is_named():
  config, b = model(**SMALL), batch(vocab=40)
  p = params(config)
  p['layers']['2']['mlp']['down'] = p['layers']['2']['mlp']['down'].at[0, 0].set(jnp.inf)
  with pytest.raises(UserError, match='the weight layers/2/mlp/down is not finite'):
    replaceability(config, p, [b])
