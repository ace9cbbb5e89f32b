"""Folders that are there whole or not at all, and paths that cannot be."""

import errno
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from lns_jax import files
from lns_jax.errors import UserError

FILL = """
import pathlib, sys, time
from lns_jax import files
with files.whole_folder(pathlib.Path(sys.argv[1])) as folder:
  (folder / 'part').write_text('x')
  pathlib.Path(sys.argv[2]).touch()
  time.sleep(60)
"""


def filling(path, ready) -> subprocess.Popen:
  process = subprocess.Popen([sys.executable, '-c', FILL, str(path), str(ready)], stderr=subprocess.PIPE)
  while not ready.exists():
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.01)
  ready.unlink()
  return process


@pytest.mark.parametrize('number, code', [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_leaves_neither_the_folder_nor_those_made_above_it(number, code, tmp_path):
  (tmp_path / 'mine').mkdir()
  process = filling(tmp_path / 'mine' / 'new' / 'er' / 'out', tmp_path / 'ready')
  assert len(list(tmp_path.rglob('part'))) == 1
  process.send_signal(number)
  assert process.wait(30) == code
  assert list(tmp_path.rglob('*')) == [tmp_path / 'mine']


def test_what_a_killed_process_left_goes_with_the_next_and_what_lives_stays(tmp_path):
  process = filling(tmp_path / 'o[u]t', tmp_path / 'ready')
  process.kill()
  process.wait()
  others = {f'o[u]t.unfinished-{os.getppid()}', 'o[u]t.unfinished-mine', f'out.unfinished-{process.pid}'}
  for name in others:
    (tmp_path / name).mkdir()
  assert (tmp_path / f'o[u]t.unfinished-{process.pid}' / 'part').exists()
  with files.whole_folder(tmp_path / 'o[u]t') as folder:
    (folder / 'all').touch()
  assert {p.name for p in tmp_path.iterdir()} == others | {'o[u]t'}


def test_sigterm_is_what_it_was_afterwards(tmp_path):
  before = signal.getsignal(signal.SIGTERM)
  with files.whole_folder(tmp_path / 'out'):
    pass
  assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize('path, words', [
    ('a/' + 'é' * 128 + '/b', 'a name in it has 256 bytes, 255 at most'), ('a\0b', 'holds a NUL'),
    ('~nobody_of_that_name/x', 'home of a user that there is not')])
def test_what_no_file_can_be_named_is_a_sentence(path, words):
  with pytest.raises(UserError, match=words) as error:
    files.absolute(path)
  assert len(str(error.value)) < 200


@pytest.mark.parametrize('text, words', [
    ('{"a": ', 'is not JSON: .*; do that'), ('[1]', 'is not a JSON object but list; do that'),
    (None, 'cannot be read: .*; do that')])
def test_what_is_no_json_object_is_a_sentence_with_what_to_do(text, words, tmp_path):
  path = tmp_path / 'x.json'
  if text is not None:
    path.write_text(text)
  with pytest.raises(UserError, match=rf'x.json {words}\.$'):
    files.read_json(path, 'do that')


def test_other_paths_are_made_absolute(monkeypatch, tmp_path):
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  assert files.absolute('~/a') == files.absolute('a') == tmp_path / 'a' and files.absolute('') == tmp_path
  assert files.absolute(pathlib.Path('é' * 127)).parent == tmp_path


def test_a_full_disk_is_a_sentence_and_what_no_disk_does_is_not(tmp_path):
  for number, said in ((errno.ENOSPC, 'written: No space left on device'), (errno.EIO, 'written or read: .*')):
    with pytest.raises(UserError, match=f'^{tmp_path} could not be {said}; all is well.$'):
      with files.disk_explained(tmp_path, 'all is well'):
        raise OSError(number, os.strerror(number))
  with pytest.raises(FileNotFoundError), files.disk_explained(tmp_path, 'all is well'):
    (tmp_path / 'missing').read_text()
