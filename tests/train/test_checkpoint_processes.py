"""Checkpoints outlive their process: failed writes, other devices, several processes, SIGKILL at any moment."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.config import CheckpointConfig
from lns_jax.train import checkpoint, manifest, stored


def run_python(code, *args, **env):
  return subprocess.run([sys.executable, '-c', code, *map(str, args)], capture_output=True, text=True, timeout=120,
                        env=os.environ | {'JAX_PLATFORMS': 'cpu'} | env)


# Disks without room.

FULL = """
import resource, sys
import jax.numpy as jnp
import numpy as np
from lns_jax.config import CheckpointConfig
from lns_jax.train import checkpoint
with checkpoint.Checkpointer(sys.argv[1], CheckpointConfig()) as keeper:
  for step, rows in ((1, 1), (2, 1000), (3, 1)):
    if sys.argv[2:]:
      resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
    w = jnp.asarray(np.random.default_rng(step).standard_normal((rows, 1000), np.float32))
    keeper.save(step, params={'w': w}, opt_state={'count': jnp.int32(step)}, data={'row': step}, config={})
"""


def assert_stopped_at_step_2(run, path, words):
  assert run.returncode == 1 and run.stdout == ''
  assert run.stderr.splitlines()[-1] == (f'lns_jax.train.checkpoint.Unwritten: checkpoint {path / "2"} could not be '
                                         f'written: {words}; earlier checkpoints are intact.')
  assert 'ERROR' not in run.stderr
  assert sum(p.stat().st_size for p in path.rglob('*') if p.is_file()) < 100_000  # what was half written is gone
  with checkpoint.Checkpointer(path, CheckpointConfig()) as keeper:
    assert keeper.steps() == [1]
    assert [p.name for p in path.iterdir()] == ['1']
  np.testing.assert_array_equal(
      stored.load_params(path)['w'], np.random.default_rng(1).standard_normal((1, 1000), np.float32))


def test_a_write_that_fails_ends_the_run_and_leaves_earlier_steps(tmp_path):
  assert_stopped_at_step_2(run_python(FULL, tmp_path, 1_000_000), tmp_path, 'File too large')


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_earlier_steps(tmp_path):
  if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', tmp_path], capture_output=True).returncode:
    pytest.skip('mounting a tmpfs needs more rights')
  try:
    path = tmp_path / 'run'
    assert_stopped_at_step_2(run_python(FULL, path), path, 'No space left on device')
  finally:
    subprocess.run(['umount', '--lazy', tmp_path], check=True)


# Other numbers of devices.

DEVICES = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from lns_jax.config import CheckpointConfig
from lns_jax.train import checkpoint

def place(devices):
  mesh = jax.make_mesh((len(devices),), ('x',), axis_types=(AxisType.Auto,), devices=devices)
  tree = {'sharded': jnp.arange(32.).reshape(8, 4), 'copied': jnp.arange(5, dtype=jnp.bfloat16)}
  return jax.device_put(tree, {'sharded': NamedSharding(mesh, P('x')), 'copied': NamedSharding(mesh, P())})

four, two = place(jax.devices()), place(jax.devices()[:2])
with checkpoint.Checkpointer(sys.argv[1], CheckpointConfig()) as keeper:
  keeper.save(1, params=four, opt_state=four, data={}, config={})
  restored = keeper.restore(two, two)
for found in (restored.params, restored.opt_state):
  assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all() and a.sharding == b.sharding, found, two)))
print(len(jax.devices()), len(restored.params['sharded'].sharding.device_set))
"""


def test_four_devices_to_two_to_one_to_none_without_a_word(tmp_path):
  run = run_python(DEVICES, tmp_path, XLA_FLAGS='--xla_force_host_platform_device_count=4')
  assert (run.stdout, run.stderr) == ('4 2\n', '')
  want = {'sharded': np.arange(32, dtype=np.float32).reshape(8, 4), 'copied': np.arange(5).astype(jnp.bfloat16)}
  one = jax.device_put(want, jax.devices()[0])
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
    restored = keeper.restore(one, one)
  for found in (restored.params, restored.opt_state, stored.load_params(tmp_path)):
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, want)


# Several processes.

PROCESSES = """
import pathlib, sys
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from lns_jax.config import CheckpointConfig
from lns_jax.train import checkpoint

path, process, port = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f'localhost:{port}', 2, process)
mesh = jax.make_mesh((4,), ('x',), axis_types=(AxisType.Auto,))
make = jax.jit(lambda k: {'w': jnp.arange(32.).reshape(8, 4) + k, 'count': jnp.int32(k)},
               out_shardings={'w': NamedSharding(mesh, P('x')), 'count': NamedSharding(mesh, P())})

def save(keeper, step):
  keeper.save(step, params=make(step), opt_state=make(step), data={'row': step}, config={})

with checkpoint.Checkpointer(path, CheckpointConfig()) as keeper:
  assert keeper.restore(make(0), make(0)) is None
  for step in (1, 2, 3):
    save(keeper, step)
multihost_utils.sync_global_devices('saved')
if process == 0:
  (path / '3' / 'config' / 'metadata').unlink()
multihost_utils.sync_global_devices('damaged')
with checkpoint.Checkpointer(path, CheckpointConfig()) as keeper:
  restored = keeper.restore(make(0), make(0))
  same = jax.jit(lambda a, b: (a['w'] == b['w']).all())
  assert restored.step == 2 and restored.data == {'row': 2} and bool(same(restored.params, make(2)))
  save(keeper, 3)
"""


@pytest.mark.slow
def test_two_processes_agree_on_the_step_and_share_one_folder(tmp_path):
  with socket.socket() as s:
    s.bind(('localhost', 0))
    port = str(s.getsockname()[1])
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=2'}
  children = [subprocess.Popen([sys.executable, '-c', PROCESSES, str(tmp_path), str(i), port], env=env,
                               stderr=subprocess.PIPE, text=True) for i in range(2)]
  errors = [child.communicate(timeout=120)[1] for child in children]
  assert [child.returncode for child in children] == [0, 0], errors
  assert '/3 is damaged: config/metadata is missing' in errors[0] and 'damaged' not in errors[1]
  assert sorted(p.name for p in tmp_path.iterdir()) == ['2', '3', '3.damaged']
  want = np.arange(32, dtype=np.float32).reshape(8, 4)
  np.testing.assert_array_equal(stored.load_params(tmp_path)['w'], want + 3)


# SIGKILL.

SAVES = """
import sys
import jax.numpy as jnp
import numpy as np
from lns_jax.config import CheckpointConfig
from lns_jax.train import checkpoint
w = jnp.asarray(np.random.default_rng(0).integers(1 << 30, size=13_000_000, dtype=np.int32))  # does not compress
like = ({'w': w, 'small': {str(i): jnp.zeros(3) for i in range(20)}}, {'count': jnp.int32(0)})
with checkpoint.Checkpointer(sys.argv[1], CheckpointConfig()) as keeper:
  restored = keeper.restore(*like)
  step = restored.step if restored else 0
  assert not restored or (restored.params['w'] == w + step).all()
  print('from', step, flush=True)
  while True:
    step += 1
    params = {'w': w + step, 'small': {str(i): jnp.full(3, float(step * i)) for i in range(20)}}
    keeper.save(step, params=params, opt_state={'count': jnp.int32(step)}, data={'row': step}, config={})
    print('saving', step, flush=True)
"""


def kill_while_saving(path, after_saves, delay):
  """Starts or resumes a run that does nothing but save 52 MB a step; kills it; returns (start, last) steps."""
  child = subprocess.Popen([sys.executable, '-c', SAVES, str(path)], stdout=subprocess.PIPE, text=True)
  start = int(child.stdout.readline().split()[1])
  for _ in range(after_saves):
    last = int(child.stdout.readline().split()[1])
  time.sleep(delay)
  child.send_signal(signal.SIGKILL)
  for line in child.communicate()[0].splitlines():
    last = int(line.split()[1])
  assert child.returncode == -signal.SIGKILL
  return start, last


def kill_and_check(path, delays):
  reached, w = 0, np.random.default_rng(0).integers(1 << 30, size=13_000_000, dtype=np.int32)
  for delay in delays:
    start, last = kill_while_saving(path, after_saves=3, delay=delay)
    assert start == reached
    with checkpoint.Checkpointer(path, CheckpointConfig()) as keeper:
      reached = keeper.latest()
      assert last - 1 <= reached <= last  # save waits for the save before it: at most the last one is lost
      assert all(p.name.isdecimal() for p in path.iterdir())
      for step in keeper.steps():
        assert manifest.damage(path / str(step)) == ''
        params = stored.load_params(path, step=step)
        assert (params['w'] == w + step).all() and all((x == step * int(i)).all() for i, x in params['small'].items())


def test_a_save_that_is_killed_costs_at_most_that_step(tmp_path):
  kill_and_check(tmp_path, [0.05])


@pytest.mark.slow
def test_saves_killed_at_random_moments_again_and_again(tmp_path):
  delays = random.Random(0)
  kill_and_check(tmp_path, [delays.uniform(0, 0.4) for _ in range(8)])
