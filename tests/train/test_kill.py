"""Kill -9 at chosen moments of a real process, twice: the run ends as if nothing had happened."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import lns_jax
from lns_jax.train import log

ROOT = pathlib.Path(__file__).parent.parent.parent
STEPS = 40


def start(workdir, cache) -> subprocess.Popen:
  arguments = [sys.executable, str(ROOT / 'experiments/pretrain.py'), '--config=quickstart:tiny',
               f'--workdir={workdir}', f'--config.train.steps={STEPS}', '--config.train.log_every=1',
               '--config.checkpoint.every=5', '--config.eval.every=10', '--config.eval.max_tokens=20000']
  # Compiled programs are kept, so that the many starts are quick; the numbers are those of one program anyhow.
  env = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache / 'jax'), 'XLA_FLAGS': '',
                      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def wait(process, condition, timeout=240):
  """Returns whether the condition came true before the process ended."""
  deadline = time.monotonic() + timeout
  while time.monotonic() < deadline:
    if condition():
      return True
    if process.poll() is not None:
      return False
    time.sleep(0.002)
  raise TimeoutError('the run did not get there')


def lines(workdir, key):
  path = workdir / 'metrics.jsonl'
  return [r['step'] for r in log.read(path) if key in r] if path.exists() else []


MOMENTS = {
    'before_the_first_step': lambda d: (d / 'run_info.json').exists(),
    'in_training': lambda d: len(lines(d, 'loss')) >= 7,
    'in_a_save': lambda d: any(d.glob('checkpoints/*.unfinished')) and len(lines(d, 'loss')) > 0,
    'in_evaluation': lambda d: max(lines(d, 'loss'), default=0) >= 10 and not lines(d, 'val_loss'),
}


def kill(workdir, cache, condition, delay=0.0):
  process = start(workdir, cache)
  assert wait(process, condition), process.communicate()[1][-2000:]
  time.sleep(delay)
  process.send_signal(signal.SIGKILL)
  process.communicate()


def finish(workdir, cache):
  process = start(workdir, cache)
  out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err[-2000:]
  return json.loads(out.splitlines()[-1])


@pytest.fixture(scope='module')
def whole(cache, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  return workdir, finish(workdir, cache)


def check_same(workdir, whole, result):
  assert result['loss'] == whole[1]['loss'] and result['train_tokens'] == whole[1]['train_tokens']
  curves = [[(r['step'], r['loss'], r['grad_norm'], r['lr'], r['tokens']) for r in log.read(d / 'metrics.jsonl')
             if 'loss' in r] for d in (workdir, whole[0])]
  assert curves[0] == curves[1] and [c[0] for c in curves[0]] == list(range(1, STEPS + 1))
  points = [[(r['step'], r['val_loss']) for r in log.read(d / 'metrics.jsonl') if 'val_loss' in r]
            for d in (workdir, whole[0])]
  assert points[0] == points[1] and [p[0] for p in points[0]] == [10, 20, 30, 40]
  a, b = lns_jax.load(workdir)[1], lns_jax.load(whole[0])[1]
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
@pytest.mark.parametrize('moment', MOMENTS)
def test_killed_at_a_moment(moment, whole, cache, tmp_path):
  workdir = tmp_path / 'run'
  kill(workdir, cache, lambda: MOMENTS[moment](workdir))
  check_same(workdir, whole, finish(workdir, cache))


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
def test_killed_at_random_twice(seed, whole, cache, tmp_path):
  workdir, rng = tmp_path / 'run', random.Random(seed)
  first, second = sorted(rng.sample(range(1, STEPS), 2))
  for step in (first, second):
    kill(workdir, cache, lambda: max(lines(workdir, 'loss'), default=0) >= step, delay=rng.uniform(0, 0.1))
  check_same(workdir, whole, finish(workdir, cache))


@pytest.mark.slow
def test_sigterm_ends_with_75_and_the_relaunch_goes_on(whole, cache, tmp_path):
  workdir = tmp_path / 'run'
  process = start(workdir, cache)
  assert wait(process, lambda: len(lines(workdir, 'loss')) >= 5)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 75 and err.strip().splitlines()[-1].startswith('preempted: saved step')
  check_same(workdir, whole, finish(workdir, cache))
