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
    for path, marked in jax.tree_util.tree_leaves_with_path(optimizer.is_matrix(tree)):
      assert marked == ('gain' not in jax.tree_util.keystr(path)), path


def test_adamw_shrinks_matrices_and_leaves_gains():
  settings = OptimizerConfig(name='adamw', weight_decay=0.5, lr=0.1, schedule='constant')
  p = params(model())
  tx = optimizer.make(settings, 10)
  updates, _ = tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p)
  new = optax.apply_updates(p, updates)
  np.testing.assert_allclose(new['layers']['1']['mlp']['up'], 0.95 * p['layers']['1']['mlp']['up'], rtol=1e-6)
  np.testing.assert_array_equal(new['final_norm']['gain'], p['final_norm']['gain'])


@pytest.mark.parametrize('clip_norm, clipped', [(0.0, [3.0, 4.0]), (1.0, [0.6, 0.8]), (10.0, [3.0, 4.0])])
def test_clipping_uses_the_global_norm_and_zero_leaves_it_out(clip_norm, clipped):
  # Without memory Adam's update is g / (|g| + eps): eps = 1 keeps the size of g in it. The norm of (3, 4) is 5.
  settings = OptimizerConfig(clip_norm=clip_norm, lr=1.0, schedule='constant', b1=0.0, b2=0.0, eps=1.0)
  tx, g = optimizer.make(settings, 1), {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
  updates, _ = tx.update(g, tx.init(g), g)
  np.testing.assert_allclose([updates['a'][0], updates['b'][0]], [-c / (c + 1) for c in clipped], rtol=1e-6)


def test_adam_equals_numpy():
  settings = OptimizerConfig(lr=0.1, schedule='constant', b1=0.9, b2=0.99, eps=1e-8)
  tx, g = optimizer.make(settings, 5), [np.array([0.5, -2.0]), np.array([1.0, 3.0])]
  p, state = {'w': jnp.array([1.0, 1.0])}, None
  state = tx.init(p)
  w, m, v = np.ones(2), np.zeros(2), np.zeros(2)
  for t, grad in enumerate(g, 1):
    updates, state = tx.update({'w': jnp.asarray(grad, jnp.float32)}, state, p)
    p = optax.apply_updates(p, updates)
    m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad ** 2
    w = w - 0.1 * (m / (1 - 0.9 ** t)) / (np.sqrt(v / (1 - 0.99 ** t)) + 1e-8)
  np.testing.assert_allclose(p['w'], w, rtol=1e-5)
