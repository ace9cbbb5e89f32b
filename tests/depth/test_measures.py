"""Which measures are taken, and which of what they find is in depth.json."""

import builtins

import numpy as np
import pytest

from lns_jax.depth.measures import MEASURES, choose
from lns_jax.errors import UserError
from tiny import batch, model, params


def test_some_measures_are_taken_only_when_they_are_named():
  config = model()
  usual = [name for name in MEASURES if name != 'tsne']
  assert list(choose([], config)) == list(choose(['all'], config)) == usual
  assert list(choose(['all', 'tsne'], config)) == list(MEASURES)
  assert list(choose(['tsne', 'profile'], config)) == ['profile', 'tsne']


def test_a_measure_that_is_too_deep_is_left_out_of_all_and_refused_by_name():
  shallow = model(num_layers=1)
  assert 'prune' not in choose(['all'], shallow) and 'profile' in choose(['all'], shallow)
  with pytest.raises(UserError, match='prune needs a model with 2 layers or more, this one has 1'):
    choose(['all', 'prune'], shallow)


def test_tsne_without_scikit_learn_is_refused_before_anything_is_measured(monkeypatch):
  real = builtins.__import__
  def without(name, *args, **kwargs):
    if name.startswith('sklearn'):
      raise ImportError(name)
    return real(name, *args, **kwargs)
  monkeypatch.setattr(builtins, '__import__', without)
  with pytest.raises(UserError, match=r"lns_jax\[tsne\]"):
    choose(['tsne'], model())
  choose(['all'], model())


def test_a_projection_is_of_the_embedding_and_of_layers_by_their_own_ids():
  config = model(num_layers=3, layer_ids=(1, 4, 6), depth=6)
  found = MEASURES['projection'].run(config, params(config), [batch()], 0)
  assert found['projection_layers'] == [0, 1, 4, 6]
  S, N, _ = found['projection_points'].shape
  assert (S, N) == (4, sum(batch()['segment_ids'].ravel() > 0)) and np.shape(found['projection_explained']) == (4, 2)
  large = set(MEASURES['projection'].arrays)
  assert {name for name, value in found.items() if np.size(value) >= N} <= large <= set(found)
