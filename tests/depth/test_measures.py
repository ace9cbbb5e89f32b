"""Which measures are taken, and which of what they find is in depth.json."""

import sys

import numpy as np
import pytest

from lns_jax.depth.measures import LOSS, MEASURES, choose
from lns_jax.errors import UserError
from lns_jax.models import transformer
from tiny import batch, model, params


def test_some_measures_are_taken_only_when_they_are_named():
  config = model()
  usual = [name for name in LOSS if name not in ('last_token', 'tsne')]
  assert list(choose([], config)) == list(choose(['all'], config)) == usual
  assert set(choose(['all', 'tsne'], config)) == {*usual, 'tsne'}
  assert list(choose(['tsne', 'profile'], config)) == ['profile', 'tsne']


def test_the_measures_of_a_task_are_taken_where_there_is_one():
  config, of_task = model(), [name for name in MEASURES if name not in LOSS]
  assert list(choose(['lens'], config, task=True)) == ['lens', *of_task]
  assert list(choose(['lens', 'task_drop'], config, task=True)) == ['lens', 'task_drop']
  assert list(choose([], config, task=True)) == [*choose([], config), *of_task]
  assert list(choose(['all', 'task_drop'], config, task=True)) == [*choose([], config), *of_task]
  with pytest.raises(UserError, match='task_drop needs a task'):
    choose(['task_drop'], config)


def test_the_last_token_is_one_a_row_and_has_keys_of_its_own():
  config, b = model(num_layers=3), batch()
  found, every = (MEASURES[name].run(config, params(config), [b], seed=0) for name in ('last_token', 'profile'))
  assert found['variance_last'].tokens == len(b['tokens']) and not set(found) & set(every)
  alone = b['segment_ids'] * 0
  for row, ids in enumerate(b['segment_ids']):
    alone[row, np.flatnonzero(ids)[-1]] = 1
  states = np.asarray(transformer.states(config, params(config), b['tokens'], segment_ids=b['segment_ids']), np.float64)
  np.testing.assert_allclose(found['variance_last'].value, np.var(states, axis=-1)[:, alone > 0].mean(axis=1), rtol=1e-5)


def test_a_measure_that_is_too_deep_is_left_out_of_all_and_refused_by_name():
  shallow = model(num_layers=1)
  assert 'prune' not in choose(['all'], shallow) and 'profile' in choose(['all'], shallow)
  with pytest.raises(UserError, match='prune needs a model with 2 layers or more, this one has 1'):
    choose(['all', 'prune'], shallow)


def test_tsne_without_scikit_learn_is_refused_before_anything_is_measured(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sklearn.manifold', None)  # as if it were not installed
  with pytest.raises(UserError, match=r"lns_jax\[tsne\]"):
    choose(['tsne'], model())
  choose(['all'], model())


def test_a_projection_is_of_the_embedding_and_of_layers_by_their_own_ids():
  config = model(num_layers=3, layer_ids=(1, 4, 6), depth=6)
  found = MEASURES['projection'].run(config, params(config), [batch()], seed=0)
  assert found['projection_layers'] == [0, 1, 4, 6]
  S, N, _ = found['projection_points'].shape
  assert (S, N) == (4, sum(batch()['segment_ids'].ravel() > 0)) and np.shape(found['projection_explained']) == (4, 2)
  large = set(MEASURES['projection'].arrays)
  assert {name for name, value in found.items() if np.size(value) >= N} <= large <= set(found)
