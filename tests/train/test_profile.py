"""Traces of steps: which, where, and what says so."""

import jax
import jax.numpy as jnp
import pytest

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.train import loop, profile


@pytest.mark.parametrize('steps', ['13:10', '10:10', 'a', '10', '0:3', '1:2:3', '-1:4', ':'])
def test_a_range_without_steps_is_refused(steps):
  with pytest.raises(UserError, match=f"profile.steps = '{steps}'.*'10:13'"):
    config_lib.ProfileConfig(steps=steps)


def test_a_range_behind_the_end_is_refused_and_the_last_step_is_in_a_run():
  def run(steps):
    return config_lib.changed(config_lib.RunConfig(), {'train': {'steps': 9}, 'profile': {'steps': steps}})
  assert list(run('9:12').profile.range) == [9, 10, 11] and not run('').profile.range
  with pytest.raises(UserError, match="'10:13' begins behind the last step of the run, 9"):
    run('10:13')


@pytest.fixture
def session(monkeypatch):
  """What jax's profiler was asked for: the step that was the next one at each start and stop."""
  calls = []
  monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder: calls.append(('start', folder)))
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('stop'))
  return calls


def walk(trace, calls, steps, fails_at=None):
  with trace:
    for step in steps:
      with trace.step(step, jnp.zeros(())):
        calls.append(step)
        if step == fails_at:
          raise KeyboardInterrupt


@pytest.mark.parametrize('first, last, expected', [
    (1, 6, [1, 2, 'start', 3, 4, 'stop', 5, 6]),
    (1, 4, [1, 2, 'start', 3, 4, 'stop']),  # the end of the run is in the range
    (4, 6, ['start', 4, 'stop', 5, 6]),  # gone on from within
    (5, 6, [5, 6]),  # and from behind
])
def test_just_the_steps_of_the_range_are_traced(first, last, expected, session, tmp_path, capsys):
  walk(profile.Trace(range(3, 5), tmp_path), session, range(first, last + 1))
  assert [c[0] if isinstance(c, tuple) else c for c in session] == expected
  said = capsys.readouterr().err
  assert ('steps 3 to 4' in said and f'xprof --port 8791 {tmp_path / "profile"}' in said) == ('start' in str(session))


def test_a_trace_is_written_when_the_run_is_stopped(session, tmp_path):
  with pytest.raises(KeyboardInterrupt):
    walk(profile.Trace(range(3, 9), tmp_path), session, range(1, 9), fails_at=4)
  assert session[-1] == 'stop'


@pytest.mark.slow
def test_a_run_leaves_a_trace(tmp_path):
  (tmp_path / 'text').mkdir()
  for name in ('train', 'validation'):
    (tmp_path / 'text' / f'{name}.txt').write_text('What a device did, and when. ' * 40)
  config = config_lib.from_dict(config_lib.RunConfig, {
      'model': {'vocab_size': 258, 'd_model': 16, 'd_ff': 32, 'num_layers': 1, 'num_heads': 2},
      'data': {'source': str(tmp_path / 'text'), 'tokenizer': 'byte', 'seq_len': 32},
      'train': {'steps': 3, 'batch_size': 8, 'layer_stats_every': 0, 'tensorboard': False}, 'profile': {'steps': '2:4'}})
  loop.train(config, tmp_path / 'run')
  (trace,) = (tmp_path / 'run' / 'profile' / 'plugins' / 'profile').glob('*/*.xplane.pb')
  assert b'step_num' in trace.read_bytes()
