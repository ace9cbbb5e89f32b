"""Schedules by hand, and what weight decay reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lns_jax.config import OptimizerConfig
from lns_jax.models import layout
from lns_jax.train import optimizer
from tiny import model, params


def rates(steps, counts, **settings):
  f = optimizer.schedule(OptimizerConfig(lr=1e-3, **settings), steps)
  return np.array([f(c) for c in counts])


def test_warm_up_and_cosine_by_hand():
  expected = [0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 9.39711e-4, 7.75e-4, 5.5e-4, 3.25e-4, 1.60289e-4, 1e-4]
  np.testing.assert_allclose(rates(10, range(11), warmup_steps=4), expected, rtol=1e-5, atol=1e-12)


def test_after_the_last_step_the_rate_stays():
  for schedule in ('cosine', 'linear', 'wsd'):
    np.testing.assert_allclose(rates(10, [10, 13, 1000], warmup_steps=4, schedule=schedule), 1e-4, rtol=1e-6)


def test_edges():
  np.testing.assert_allclose(rates(10, [0], warmup_steps=0), 1e-3)
  np.testing.assert_allclose(rates(1, [0, 1], warmup_steps=0), [1e-3, 1e-4], rtol=1e-6)
  np.testing.assert_allclose(rates(4, [0, 1, 2, 3, 4, 9], warmup_steps=4),
                             [0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3], rtol=1e-6)
  np.testing.assert_allclose(rates(5, range(6), schedule='constant'), 1e-3)


def test_linear_and_wsd_by_hand():
  np.testing.assert_allclose(rates(10, [0, 5, 10], schedule='linear'), [1e-3, 5.5e-4, 1e-4], rtol=1e-6)
  np.testing.assert_allclose(rates(10, [1, 2, 7, 8, 9, 10], schedule='wsd', warmup_steps=2, final_lr_ratio=0.0),
                             [5e-4, 1e-3, 1e-3, 1e-3, 5e-4, 0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize('scheme', ['lns', 'mix'])
def test_decay_reaches_matrices_only_in_both_layouts(scheme):
  config = model(scheme=scheme, num_layers=4)
  p = params(config)
  for tree in (p, layout.stack(p, config)):
    for path, marked in jax.tree_util.tree_leaves_with_path(optimizer.matrices(tree)):
      assert marked == ('gain' not in jax.tree_util.keystr(path)), path


def test_adamw_shrinks_matrices_and_leaves_gains():
  settings = OptimizerConfig(name='adamw', weight_decay=0.5, lr=0.1, schedule='constant')
  p = params(model())
  tx = optimizer.make(settings, 10, model())
  updates, _ = tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p)
  new = optax.apply_updates(p, updates)
  np.testing.assert_allclose(new['layers']['1']['mlp']['up'], 0.95 * p['layers']['1']['mlp']['up'], rtol=1e-6)
  np.testing.assert_array_equal(new['final_norm']['gain'], p['final_norm']['gain'])


@pytest.mark.parametrize('clip_norm, clipped', [(0.0, [3.0, 4.0]), (1.0, [0.6, 0.8]), (10.0, [3.0, 4.0])])
def test_clipping_uses_the_global_norm_and_zero_leaves_it_out(clip_norm, clipped):
  # Without memory Adam's update is g / (|g| + eps): eps = 1 keeps the size of g in it. The norm of (3, 4) is 5.
  settings = OptimizerConfig(clip_norm=clip_norm, lr=1.0, schedule='constant', b1=0.0, b2=0.0, eps=1.0)
  tx, g = optimizer.make(settings, 1, model()), {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
  updates, _ = tx.update(g, tx.init(g), g)
  np.testing.assert_allclose([updates['a'][0], updates['b'][0]], [-c / (c + 1) for c in clipped], rtol=1e-6)


@pytest.mark.parametrize('changes, bounded', [
    ({}, True), ({'eps': 1e-15, 'weight_decay': 0.1, 'name': 'adamw'}, True), ({'lr': 1e39}, False),
    ({'lr': 1e20}, False), ({'eps': 0.0}, False), ({'b1': 1 - 1e-12}, False), ({'b2': 1 - 1e-12}, False)])
def test_settings_bound_the_update_of_the_largest_gradient(changes, bounded):
  """Where they claim to: the sum of squares of this gradient is barely finite, and the second moment may be 0."""
  settings = OptimizerConfig(**{'lr': 1e-3, 'clip_norm': 0.0, **changes})
  config = model()
  assert optimizer.bounded(settings, config) == bounded
  if bounded:
    p = params(config)
    tx = optimizer.make(settings, 10, config)
    grads = jax.tree.map(lambda x: jnp.zeros_like(x).at[(0,) * x.ndim].set(1.8e18), p)
    state = tx.init(p)
    for _ in range(2):
      updates, state = tx.update(grads, state, p)
      assert np.isfinite(optax.tree_utils.tree_norm(updates))
      grads = jax.tree.map(jnp.zeros_like, grads)


def test_adam_equals_numpy():
  settings = OptimizerConfig(lr=0.1, schedule='constant', b1=0.9, b2=0.99, eps=1e-8)
  tx, g = optimizer.make(settings, 5, model()), [np.array([0.5, -2.0]), np.array([1.0, 3.0])]
  p, state = {'w': jnp.array([1.0, 1.0])}, None
  state = tx.init(p)
  w, m, v = np.ones(2), np.zeros(2), np.zeros(2)
  for t, grad in enumerate(g, 1):
    updates, state = tx.update({'w': jnp.asarray(grad, jnp.float32)}, state, p)
    p = optax.apply_updates(p, updates)
    m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad ** 2
    w = w - 0.1 * (m / (1 - 0.9 ** t)) / (np.sqrt(v / (1 - 0.99 ** t)) + 1e-8)
  np.testing.assert_allclose(p['w'], w, rtol=1e-5)


def first_update(settings, config, grads=None, p=None):
  """The first update of Adam without memory: eps = 1 keeps the size of a gradient in it."""
  p = p or params(config)
  grads = grads or jax.tree.map(jnp.ones_like, p)
  tx = optimizer.make(settings, 10, config)
  return tx.update(grads, tx.init(p), p)[0]


def plain(**changes):
  return OptimizerConfig(**{**dict(lr=1.0, schedule='constant', b1=0.0, b2=0.0, eps=1.0), **changes})


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_learned_factors_have_their_own_rate(loop):
  config = model(scheme='lns_learned', loop=loop)
  u = first_update(plain(alpha_lr_ratio=0.1), config)
  layer = u['layers']['1-2' if loop == 'scan' else '2']
  np.testing.assert_allclose(layer['attn_s'], -0.05, rtol=1e-6)
  np.testing.assert_allclose(layer['attn_in_norm']['gain'], -0.5, rtol=1e-6)
  np.testing.assert_allclose(u['head']['table'], -0.5, rtol=1e-6)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
@pytest.mark.parametrize('how, alpha, rest', [
    # Gradients: 4 alphas of 1 (norm 2), all others 0 but one of 1.5: joint norm 2.5.
    ('joint', 1 / 2.5, 1.5 / 2.5), ('apart', 1 / 2, 1.0), ('none', 1.0, 1.0)])
def test_alpha_is_clipped_with_the_rest_apart_or_not(how, alpha, rest, loop):
  config = model(scheme='lns_learned', loop=loop)
  grads = jax.tree.map(jnp.zeros_like, params(config))
  for layer in grads['layers'].values():
    layer |= {name: jnp.ones_like(layer[name]) for name in ('attn_s', 'mlp_s')}
  grads['final_norm']['gain'] = grads['final_norm']['gain'].at[3].set(1.5)
  u = first_update(plain(clip_norm=1.0, alpha_clip=how), config, grads)
  for layer in u['layers'].values():
    np.testing.assert_allclose(layer['mlp_s'], -alpha / (1 + alpha), rtol=1e-6)
  assert float(u['final_norm']['gain'][3]) == pytest.approx(-rest / (1 + rest), rel=1e-6)


def test_alpha_may_be_clipped_where_nothing_else_is():
  """GPAS clips its gates alone, at 0.01."""
  config = model(scheme='gpas')
  u = first_update(plain(alpha_clip='apart', alpha_clip_norm=0.01), config)
  each = 0.01 / np.sqrt(2)
  assert float(u['layers']['1']['stream_gate']) == pytest.approx(-each / (1 + each), rel=1e-5)
  np.testing.assert_allclose(u['head']['table'], -0.5, rtol=1e-6)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_completep_scales_rate_epsilon_and_decay(loop):
  """m_N = 64 / 16 = 4, m_L = 8 / 2 = 4, alpha = 1/2: arXiv 2505.01618, table 1, by hand."""
  config = model(scheme='completep', num_layers=8, base_width=16, completep_alpha=0.5, loop=loop)
  p = jax.tree.map(jnp.ones_like, params(config))
  u = first_update(plain(name='adamw', weight_decay=0.5), config, p=p)
  adam = lambda eps: 1 / (1 + eps)
  layer = u['layers']['1-8' if loop == 'scan' else '5']
  np.testing.assert_allclose(layer['mlp']['up'], -(4 ** -0.5 / 4) * (adam(1 / 4 / 2) + 0.5 * 4), rtol=1e-6)
  np.testing.assert_allclose(layer['mlp_in_norm']['gain'], -(4 ** -0.5) * adam(1 / 4 / 2), rtol=1e-6)
  np.testing.assert_allclose(u['head']['table'], -(adam(1 / 4) + 0.5), rtol=1e-6)
  np.testing.assert_allclose(u['final_norm']['gain'], -adam(1 / 4), rtol=1e-6)


def test_completep_at_its_base_is_adam():
  config = model(scheme='completep', num_layers=2)
  for a, b in zip(jax.tree.leaves(first_update(plain(), config)), jax.tree.leaves(first_update(plain(), model()))):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
@pytest.mark.parametrize('scheme', ['layerscale', 'admin'])
def test_decay_of_matrices_leaves_vectors_of_factors_alone(loop, scheme):
  config = model(scheme=scheme, loop=loop)
  p = params(config)
  u = first_update(plain(name='adamw', weight_decay=0.5), config, jax.tree.map(jnp.zeros_like, p), p)
  layer = u['layers']['1-2' if loop == 'scan' else '2']
  assert not layer['mlp_b' if scheme == 'layerscale' else 'mlp_a'].any() and layer['mlp']['up'].any()


def test_decay_of_all_reaches_gains():
  settings = plain(name='adamw', weight_decay=0.5, decay='all')
  p = params(model())
  u = first_update(settings, model(), jax.tree.map(jnp.zeros_like, p), p)
  np.testing.assert_allclose(u['layers']['1']['mlp_in_norm']['gain'], -0.5 * p['layers']['1']['mlp_in_norm']['gain'])
