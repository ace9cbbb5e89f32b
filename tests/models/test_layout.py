"""The two layouts of the layers, and the way between them."""

import jax
import numpy as np
import optax
import pytest

from lns_jax.models import layout
from tiny import model, params


@pytest.mark.parametrize('run, name', [
    ((1, 2, 3), '1-3'), ((1, 2, 3, 5), '1-3,5-5'), ((7,), '7-7'), ((2, 4), '2-2,4-4')])
def test_run_names(run, name):
  assert layout.run_name(run) == name and layout.run_ids(name) == run


def test_runs_are_layers_of_one_row():
  assert layout.runs(model(scheme='lns', num_layers=5)) == [(1, 2, 3, 4, 5)]
  assert layout.runs(model(scheme='mix', num_layers=8)) == [(1, 2), (3, 4, 5, 6, 7, 8)]
  assert layout.runs(model(scheme='mix', num_layers=3, layer_ids=(2, 3, 8), depth=8)) == [(2,), (3, 8)]


@pytest.mark.parametrize('scheme', ['lns', 'mix'])
def test_there_and_back_again(scheme):
  config = model(scheme=scheme, num_layers=4, mix_fraction=0.25)
  p = params(config)
  there = layout.stack(p, config)
  assert layout.is_stacked(there['layers']) and not layout.is_stacked(p['layers'])
  jax.tree.map(np.testing.assert_array_equal, p, layout.unstack(there))
  assert layout.unstack(p)['layers'].keys() == p['layers'].keys()


@pytest.mark.parametrize('settings', [{}, {'loop': 'scan', 'sliding_window': 4, 'window_layers': (6, 12)}])
def test_layers_are_joined_in_the_order_of_their_ids(settings):
  config = model(num_layers=12, **settings)
  layers = layout.native({'layers': {str(l): {'id': np.float32(l)} for l in range(1, 13)}}, config)['layers']
  for tree in (layers, jax.tree.map(lambda x: x, layers)):  # names of the second are sorted as strings
    np.testing.assert_array_equal(layout.joined(tree)['id'], range(1, 13))


def test_an_optimizer_state_converts_with_the_same_function():
  config = model(num_layers=4)
  p, tx = params(config), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
  _, state = tx.update(jax.tree.map(lambda x: 0.1 * x, p), tx.init(p), p)
  there = layout.stack(state, config)
  assert jax.tree.structure(there) == jax.tree.structure(tx.init(layout.stack(p, config)))
  jax.tree.map(np.testing.assert_array_equal, state, layout.unstack(there))
