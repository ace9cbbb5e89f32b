"""The monitor measures any loop's depth as ours does, and warns once, of idle layers alone."""

import doctest
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax import config as config_lib
from lns_jax.depth import Monitor, monitor
from lns_jax.errors import UserError
from lns_jax.models import layout, transformer
from lns_jax.train import log
from lns_jax.train import step as step_lib
from tiny import batch, model


def test_the_examples_run():
  result = doctest.testmod(monitor)
  assert result.attempted > 10 and not result.failed


def tree(values):
  return {'layers': [{'w': jnp.asarray(v, jnp.float32)} for v in values], 'head': jnp.float32([1.0, -2.0])}


def test_measures_equal_a_hand_calculation():
  grads, updates = tree([[1, 2], [3, 4], [0, -1]]), tree([[-1, 0], [-0.5, -0.25], [2, 1]])
  states = np.float32([[[1, 3], [0, 2]], [[2, 4], [9, 9]], [[2, 10], [9, 9]]])  # 3 states, 2 tokens, 2 units
  found = jax.jit(Monitor().measure)(states=states, mask=np.float32([1, 0]), grads=grads, updates=updates)
  expected = {'layer_grad_norm': [5 ** 0.5, 5, 1], 'grad_norm': 36 ** 0.5, 'layer_decrease': [1, 2.5, 1],
              'predicted_decrease': -0.5, 'variance': [1, 1, 16], 'layer_ratio': [(1 / 5) ** 0.5, (18 / 10) ** 0.5]}
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_states_come_in_a_list_in_a_mapping_or_through_read():
  x = np.random.default_rng(0).normal(size=(12, 2, 3, 4)).astype(np.float32)
  whole = Monitor().measure(states=x)
  named = {f'layers_{l}': x[l] for l in range(1, 12)} | {'embed': x[0]}
  for found in (Monitor().measure(states=list(x)), Monitor().measure(states=named),
                Monitor().measure(states={'embed': x[0], 'layers': x[1:]}),
                Monitor(read=lambda outputs: outputs['hidden']).measure(states={'hidden': x})):
    np.testing.assert_array_equal(found['variance'], whole['variance'])
  with pytest.raises(UserError, match='layers_1/b is a second state of layer 1'):
    Monitor().measure(states={'layers_1': {'a': x[0], 'b': x[1]}})


@pytest.mark.parametrize('loop', [pytest.param('unrolled', marks=pytest.mark.slow), 'scan'])
def test_it_measures_what_our_own_loop_logs(loop):
  config = config_lib.RunConfig(model=model(loop=loop, d_model=16, d_ff=32),
                                data=config_lib.DataConfig(seq_len=16),
                                optimizer=config_lib.OptimizerConfig(lr=1e-2, eps=1.0, schedule='constant'),
                                train=config_lib.TrainConfig(steps=1, batch_size=4, layer_stats_every=1))
  b, state = batch(segments=False), jax.jit(lambda: step_lib.init_state(config, 1))()
  after, logged = jax.jit(step_lib.make_train_step(config, 1))(state, b)
  def loss(p):
    total, (weight, _) = step_lib.loss_sums(config.model, p, b)
    return total / weight
  updates = jax.tree.map(jnp.subtract, after.params, state.params)
  states = jax.jit(transformer.states, static_argnums=0)(config.model, state.params, b['tokens'])
  found = Monitor().measure(states=states, grads=jax.jit(jax.grad(loss))(state.params), updates=updates)
  for name in ('variance', 'layer_grad_norm', 'grad_norm', 'layer_decrease', 'predicted_decrease'):
    np.testing.assert_allclose(found[name], logged[name], rtol=1e-3, err_msg=name)


def test_records_are_kept_and_written_as_ours(tmp_path):
  path = tmp_path / 'run' / 'metrics.jsonl'
  m = Monitor(path=path)
  m.update(1, {'loss': jnp.float32(2.5), 'variance': jnp.ones(3), 'bad': float('nan')})
  m.update(np.int64(2), {'loss': 2.25})
  assert m.history == [{'step': 1, 'loss': 2.5, 'variance': [1.0, 1.0, 1.0], 'bad': None}, {'step': 2, 'loss': 2.25}]
  assert log.read(path) == m.history == [json.loads(line) for line in path.read_text().splitlines()]


def steps(m, decreases, first=1):
  """Messages of the warnings while records come in."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for i, decrease in enumerate(decreases):
      m.update(first + i, {'layer_decrease': decrease})
  return [str(w.message) for w in caught]


IDLE, BUSY = [0.5, 0.2, 0.1, 0.15, 0.05, 0.0], [0.5, 0.2, 0.1, 0.1, 0.05, 0.05]  # the last two layers: 5 % and 10 %


def test_an_idle_last_third_is_told_once_with_its_numbers():
  m = Monitor(patience=3, warmup=0)
  assert steps(m, [IDLE] * 2) == []
  (message,) = steps(m, [IDLE] * 20, first=3)
  assert 'step 3: the last third of the layers (5 to 6 of 6) brought 5.0% of the decrease' in message
  assert 'less than 10% in each of the last 3 records, since step 1:' in message
  assert m.warned == 3 and len(m.history) == 22


@pytest.mark.parametrize('decreases', [
    [BUSY] * 40, [IDLE, IDLE, BUSY] * 10,
    [[0.0] * 6] * 20,  # a rate of 0
    [[-v for v in IDLE]] * 20, [[None] * 6] * 20,
    [[1.0, 0.0]] * 20,  # two layers have no third
], ids=['busy', 'in between', 'no update', 'no decrease', 'not finite', 'two layers'])
def test_nothing_else_warns(decreases):
  assert steps(Monitor(patience=3, warmup=0), decreases) == []


def test_warm_up_is_not_judged():
  m = Monitor(patience=3)
  assert steps(m, [IDLE] * 1000) == []
  assert len(steps(m, [IDLE] * 3, first=1001)) == 1


def test_records_without_a_decrease_neither_count_nor_begin_anew():
  m = Monitor(patience=2, warmup=0)
  assert steps(m, [IDLE]) == []
  m.update(2, {'val_loss': 1.0})
  assert len(steps(m, [IDLE], first=3)) == 1


def test_layers_that_do_not_learn_are_found_in_a_real_loop():
  """Six residual layers, of which the last two get no updates."""
  rng = np.random.default_rng(0)
  params = {f'block_{l}': {'w': jnp.asarray(rng.normal(size=(4, 4)) * 0.3, jnp.float32)} for l in range(6)}
  x, y = rng.normal(size=(2, 8, 4)).astype(np.float32)
  def loss(p):
    h = x
    for l in range(6):
      h = h + jnp.tanh(h @ p[f'block_{l}']['w'])
    return jnp.mean((h - y) ** 2)
  def run(m, rates):
    @jax.jit
    def step(p):
      grads = jax.grad(loss)(p)
      updates = {name: {'w': -rates[name] * g['w']} for name, g in grads.items()}
      return jax.tree.map(jnp.add, p, updates), m.measure(grads=grads, updates=updates)
    p = params
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      for i in range(1, 9):
        p, metrics = step(p)
        m.update(i, metrics)
    return caught
  everywhere = dict.fromkeys(params, 1e-3)
  assert not run(Monitor(patience=5, warmup=0), everywhere)
  (warning,) = run(Monitor(patience=5, warmup=0), everywhere | {'block_4': 0.0, 'block_5': 0.0})
  assert '(5 to 6 of 6) brought 0.0%' in str(warning.message)


@pytest.mark.parametrize('trees, message', [
    (dict(updates=tree([[1, 2]])), 'updates need grads'),
    (dict(grads={'Dense_0': jnp.ones(2)}), "no path names a layer, the first is 'Dense_0'")])
def test_what_cannot_be_measured_is_refused(trees, message):
  with pytest.raises(UserError, match=message):
    Monitor().measure(**trees)
