"""Which processes belong together, said by flags or found; what is refused before anything waits."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from absl import flags

import processes
from lns_jax import distributed, joining
from lns_jax.errors import UserError


class Given:
  """Flags as a command would have them."""

  def __init__(self, *arguments):
    self.flags = flags.FlagValues()
    for name, kind in (('coordinator', flags.DEFINE_string), ('processes', flags.DEFINE_integer),
                       ('process', flags.DEFINE_integer)):
      kind(name, None, '', flag_values=self.flags)
    flags.DEFINE_enum('distributed', 'auto', ['auto', 'on', 'off'], '', flag_values=self.flags)
    flags.DEFINE_integer('join_timeout', 300, '', flag_values=self.flags)
    self.flags(['program', *arguments])


def asked(*arguments):
  return distributed._asked(Given(*arguments).flags)


def test_flags_name_the_processes():
  assert asked('--coordinator=10.0.0.2:8476', '--processes=4', '--process=3') == ('10.0.0.2:8476', 4, 3)
  assert asked('--coordinator=h:1', '--processes=1', '--process=0') is None  # alone
  assert asked('--distributed=off') is None


@pytest.mark.parametrize('arguments, words', [
    (['--processes=2', '--process=1'], '--coordinator must be given as well'),
    (['--coordinator=h:1', '--process=1'], '--processes must be given as well'),
    (['--coordinator=h:1', '--processes=2'], '--process must be given as well'),
    (['--coordinator=h:1', '--processes=2', '--process=2'], '--process=2 is not one of --processes=2, .* 0 to 1'),
    (['--coordinator=h', '--processes=2', '--process=1'], '--coordinator=h is not HOST:PORT'),
    (['--distributed=off', '--processes=2'], '--distributed=off is one process alone, but --processes is given')])
def test_half_a_group_is_refused(arguments, words):
  with pytest.raises(UserError, match=words):
    asked(*arguments)


def test_a_machine_of_its_own_starts_alone(monkeypatch):
  """Of this machine, and of one where JAX may look for a TPU, as in Colab; nothing is asked of a network."""
  monkeypatch.setattr('socket.create_connection', lambda *_, **__: pytest.fail('asked a network'))
  assert asked() is None
  monkeypatch.delenv('JAX_PLATFORMS')
  assert asked() is None
  with pytest.raises(UserError, match='--distributed=on, but JAX knows no cluster'):
    asked('--distributed=on')


@pytest.mark.parametrize('hosts, want', [('localhost', None), ('localhost,other', ('localhost:77', 2, 1))])
def test_a_slice_is_joined_and_a_single_tpu_host_is_not(hosts, want, monkeypatch):
  from jax._src import cloud_tpu_init
  from jax._src.clusters import cloud_tpu_cluster
  for module in (cloud_tpu_init, cloud_tpu_cluster):
    monkeypatch.setattr(module, 'running_in_cloud_tpu_vm', True)
  for name, value in (('JAX_PLATFORMS', 'tpu,cpu'), ('TPU_WORKER_HOSTNAMES', hosts), ('TPU_WORKER_ID', '1'),
                      ('TPU_SKIP_MDS_QUERY', '1'), ('JAX_COORDINATOR_PORT', '77'),
                      ('MEGASCALE_COORDINATOR_ADDRESS', 'localhost'), ('MEGASCALE_NUM_SLICES', '1'),
                      ('MEGASCALE_SLICE_ID', '0')):
    monkeypatch.setenv(name, value)
  assert joining.of_environment(False, 5) == want
  monkeypatch.setenv('JAX_PLATFORMS', '')  # JAX's own choice, too
  assert joining.of_environment(False, 5) == want


def test_the_watchdog_speaks_every_time_and_ends_at_last(monkeypatch, capfd):
  monkeypatch.setattr(joining, 'EVERY', 0.2)
  ended = threading.Event()
  said = []
  def end(code, sentence):
    said.append((code, sentence))
    ended.set()
  joining.watch('localhost:1', 3, 2, 0.5, threading.Event(), end)
  assert ended.wait(10)
  lines = capfd.readouterr().err.splitlines()
  assert len(lines) == 2 and all(line.startswith('process 2 of 3 is waiting: process 0 of 3 does not answer at '
                                                 'localhost:1 (Connection refused) after ') for line in lines)
  assert said == [(1, f'error: process 0 of 3 does not answer at localhost:1 (Connection refused) after 0.5 s; '
                      f'{joining.CAUSES}.')]


def test_one_who_arrives_in_time_hears_nothing(monkeypatch, capfd):
  there = threading.Event()
  there.set()
  joining.watch('localhost:1', 2, 0, 1, there, lambda *_: pytest.fail('ended'))
  assert capfd.readouterr().err == ''


def test_only_the_end_of_another_counts_as_its_loss():
  from jax.errors import JaxRuntimeError
  gone = JaxRuntimeError('UNKNOWN: Gloo all-reduce failed: Connection closed by peer')
  try:
    try:
      raise gone
    except JaxRuntimeError as e:
      raise UserError('checkpoint could not be written') from e
  except UserError as e:
    assert distributed._loss(e) is gone
  raw = ValueError('UNKNOWN: Gloo all-reduce failed: Read error [127.0.0.1]:7080: Connection reset by peer')
  assert distributed._loss(raw) is raw and distributed._loss(ValueError('connection reset')) is None
  storage = ValueError('ABORTED: Error opening "zarr" driver: All 1 retry attempts failed: CURL error Could not connect')
  assert distributed._loss(storage) is None  # TensorStore's, of a bucket that does not answer
  for own in ('RESOURCE_EXHAUSTED: out of memory',
              'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\n  Size: 2.00G, op_name="jit(step)/barrier"',
              'INTERNAL: none\n  %opt = f32[8] optimization-barrier(%a), op_name="jit(step)/optimization_barrier"',
              'ABORTED: The TPU is already in use by process with pid 7.',
              'UNAVAILABLE: TPU initialization failed: open(/dev/vfio/0): Device or resource busy'):
    assert distributed._loss(JaxRuntimeError(own)) is None, own
  for theirs in ('ABORTED: Barrier failed because: [/job:jax_worker/task:1] has disconnected',
                 'UNAVAILABLE: failed to connect to all addresses', 'INTERNAL: Shutdown barrier has failed'):
    assert distributed._loss(JaxRuntimeError(theirs)), theirs
  assert distributed._loss(UserError('connection closed')) is None


END = """
import sys
from absl import app, flags
from lns_jax import distributed
distributed.define_flags()
def main(argv):
  distributed.join()
  print('joined', flush=True)
  sys.exit(int(sys.stdin.readline()))
app.run(main)
"""


def test_one_that_is_done_ends_with_its_own_code_though_it_gets_sigterm():
  port = processes.free_port()
  both = [subprocess.Popen(
      [sys.executable, '-c', END, f'--coordinator=localhost:{port}', '--processes=2', f'--process={i}'], text=True,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in (0, 1)]
  try:
    assert [child.stdout.readline() for child in both] == ['joined\n'] * 2
    both[1].stdin.write('3\n')
    both[1].stdin.flush()
    time.sleep(2)  # it waits for the other one by now
    both[1].send_signal(signal.SIGTERM)
    assert 'SIGTERM: this process is done and waits for the others.\n' in both[1].stderr
    both[0].communicate('0\n', timeout=60)
    both[1].communicate(timeout=60)
    assert [child.returncode for child in both] == [0, 3]
  finally:
    for child in both:
      child.kill()
      child.communicate()


def test_sigterm_while_the_others_are_awaited_asks_for_another_start():
  port = processes.free_port()
  arguments = [f'--coordinator=localhost:{port}', '--processes=2', '--process=0', '--config=quickstart',
               '--workdir=unused']
  child = subprocess.Popen([sys.executable, str(processes.ROOT / 'experiments/pretrain.py'), *arguments], text=True,
                           stderr=subprocess.PIPE)
  try:
    processes.wait([child], lambda: joining.connected(port))  # to itself: it waits for the other one
    child.send_signal(signal.SIGTERM)
    said = child.communicate(timeout=30)[1]
    assert child.returncode == 75 and said.strip().startswith('preempted: SIGTERM came before there was anything to ')
  finally:
    child.kill()
    child.communicate()


def test_the_last_word_is_ours():
  """Whatever threads of C++ print, as JAX's do when another process is lost."""
  code = ("import os, sys; from lns_jax import joining; joining.keep('stderr'); print('lost.', file=sys.stderr); "
          "os.write(2, b'E1130 coordination_service.cc')")
  ended = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
  assert (ended.returncode, ended.stderr) == (0, 'lost.\n')
