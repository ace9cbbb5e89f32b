"""PCA against its definition, which tokens are drawn, and what is refused."""

import sys

import jax
import numpy as np
import pytest

import lns_jax
from lns_jax.depth import projection
from lns_jax.depth.projection import project
from lns_jax.errors import UserError
from tiny import batch, model, params

STATES = jax.jit(lns_jax.states, static_argnums=0)
SMALL = dict(vocab_size=40, d_model=16, d_ff=32, num_heads=2, num_kv_heads=1)


def test_the_axes_are_those_of_the_largest_eigenvalues_of_the_covariance():
  x = np.random.default_rng(0).normal(size=(40, 5)) * [3, 1, 5, 2, 1] + 7
  points, explained = projection.pca(x)
  values, vectors = np.linalg.eigh(np.cov(x.T, ddof=0))
  np.testing.assert_allclose(np.abs(points), np.abs((x - x.mean(0)) @ vectors[:, [-1, -2]]), atol=1e-10)
  np.testing.assert_allclose(explained, values[[-1, -2]] / values.sum())


def test_points_are_of_the_tokens_that_are_named():
  config, batches = model(**SMALL, loop='scan'), [batch(vocab=40), batch(vocab=40, seed=1), None]
  p = params(config)
  found = project(config, p, batches, tokens=36, per_sequence=5, at=(0, 2))  # the third batch is not read
  rows = {name: np.concatenate([b[name] for b in batches[:2]]) for name in ('tokens', 'segment_ids')}
  sequence, position = found['sequence'], found['position']
  assert len(sequence) == 36 and len(set(zip(sequence, position))) == 36
  np.testing.assert_array_equal(np.bincount(sequence), [5, 5, 5, 5, 5, 5, 5, 1])
  assert (rows['segment_ids'][sequence, position] > 0).all()
  np.testing.assert_array_equal(found['token'], rows['tokens'][sequence, position])
  states = np.concatenate([STATES(config, p, b['tokens'], segment_ids=b['segment_ids']) for b in batches[:2]], axis=1)
  for i, state in enumerate((0, 2)):
    points, explained = projection.pca(states[state][sequence, position].astype(np.float64))
    np.testing.assert_allclose(np.abs(found['points'][i]), np.abs(points), atol=1e-6)
    np.testing.assert_allclose(found['explained'][i], explained)


def test_a_frequency_is_a_share_of_the_real_tokens_that_were_read():
  config = model(**SMALL)
  tokens = np.array([[3, 3, 3, 5, 7, 7], [3, 5, 0, 0, 0, 0]], np.int32)
  b = {'tokens': tokens, 'segment_ids': np.array([[1] * 6, [1] * 2 + [0] * 4], np.int32)}
  found = project(config, params(config), [b], at=(0,))
  share = {3: 4 / 8, 5: 2 / 8, 7: 2 / 8}  # 3 x 4, 5 x 2, 7 x 2 of 8 real tokens; the 0s are padding
  np.testing.assert_allclose(found['frequency'], [share[t] for t in found['token']])


def test_axes_do_not_flip_from_one_state_to_the_next():
  config = model(**SMALL, num_layers=4)
  points = project(config, params(config), [batch(vocab=40)])['points']
  assert points.shape[0] == 5 and (np.sum(points[:-1] * points[1:], axis=1) >= 0).all()


def test_tsne_is_scikit_learns_and_without_it_the_extra_is_named(monkeypatch):
  config, b = model(**SMALL), batch(vocab=40, T=8)
  p = params(config)
  found = project(config, p, [b], method='tsne', at=(1,))
  assert found['points'].shape == (1, len(found['token']), 2) and np.isfinite(found['points']).all()
  assert 'explained' not in found
  monkeypatch.setitem(sys.modules, 'sklearn.manifold', None)  # as if it were not installed
  with pytest.raises(UserError, match=r"scikit-learn: pip install 'lns_jax\[tsne\]'"):
    project(config, p, [b], method='tsne')
  project(config, p, [b], at=(1,))


def test_what_cannot_be_drawn_is_an_error():
  config, b = model(**SMALL), batch(vocab=40)
  p = params(config)
  with pytest.raises(UserError, match="'umap'; it is one of pca, tsne"):
    project(config, p, [b], method='umap')
  with pytest.raises(UserError, match=r'states to project are 0..2, got \[1, 3\]'):
    project(config, p, [b], at=(3, 1))
  for batches in ([], [b | {'segment_ids': 0 * b['segment_ids']}]):
    with pytest.raises(UserError, match='3 real tokens or more, the sample has 0'):
      project(config, p, batches)
  p['embed']['table'] = p['embed']['table'].at[int(b['tokens'][1, 0])].set(np.nan)
  with pytest.raises(UserError, match='the weight embed/table is not finite'):
    project(config, p, [b])
