"""Run folders in a bucket, gs://BUCKET/RUN.

Checkpoints are written to and read from the bucket directly. The other files of a run are small, and some grow line by
line, which no bucket allows: they lie in a local folder, which process 0 copies to the bucket at every save and
evaluation and at the end, and from there when a run goes on, on whatever machine. That folder is a run folder like any
other, but for a file `checkpoints.url` in place of its folder `checkpoints`.

No lock keeps two machines from one folder in a bucket: `resume.alone` holds the local one.
"""

import contextlib
import hashlib
import pathlib

from absl import logging
from etils import epath

from lns_jax import distributed, files
from lns_jax.errors import UserError

POINTER, _PUSHED, _LOCK = 'checkpoints.url', '.pushed.json', '.lock'
_UNKNOWN = {'state': None, 'digests': []}  # record of a file that was never copied, see `_known`


def is_url(path) -> bool:
  """Whether a path is in a bucket."""
  return '://' in str(path)


def folder(url: str, kind: str = 'runs') -> pathlib.Path:
  """The local folder of a run in a bucket, made if it is not there; `kind` tells those of readers from a run's own.

  Raises:
    UserError: it is not gs://, the package that reads buckets is not installed, or the bucket cannot be read.
  """
  url = str(url).rstrip('/')
  scheme, _, name = url.partition('://')
  if scheme != 'gs' or not name:
    raise UserError(f'{url} cannot be a run folder: gs://BUCKET/FOLDER can, or a local folder.')
  try:
    import fsspec
    import gcsfs  # noqa: F401
  except ImportError:
    raise UserError(f"{url} needs the package gcsfs: pip install 'lns_jax[gcs]'.") from None
  # A list of files that is kept would not show what Orbax and other processes write.
  fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
  with _explained(f'{url} cannot be read'):
    epath.Path(url).exists()
  local = files.cache_folder() / kind / scheme / name
  local.mkdir(parents=True, exist_ok=True)
  files.write_text(local / POINTER, f'{url}/checkpoints')
  return local


def local(path):
  """A run folder in a bucket as a local one with its small files, to read from; any other path as it is."""
  if not is_url(path):
    return path
  found = folder(path, 'read')
  pull(found)
  return found


def is_mirror(workdir: pathlib.Path) -> bool:
  """Whether a local folder stands for one in a bucket."""
  return (workdir / POINTER).is_file()


def checkpoints(workdir: pathlib.Path) -> epath.Path:
  """Where the checkpoints of a local run folder are, its own or in a bucket."""
  pointer = pathlib.Path(workdir) / POINTER
  return epath.Path(pointer.read_text() if pointer.is_file() else pathlib.Path(workdir) / 'checkpoints')


def pull(workdir: pathlib.Path):
  """Makes the local folder of a run in a bucket what that is, checkpoints apart. Raises UserError.

  A file that is in the bucket as it was copied there from here, heard of or not, stays as it is here, which is as new
  or newer: a run that was killed, or could not copy, may have written what belongs to a checkpoint since. What is newer
  than the newest checkpoint is left to whoever goes on from there, as in any run folder.
  """
  remote, known = checkpoints(workdir).parent, _known(workdir)
  with _explained(f'{remote} cannot be copied to {workdir}'):
    there = dict(_files(remote)) if remote.exists() else {}
    for name, path in there.items():
      content, local = path.read_bytes(), workdir / name
      if local.is_file() and _digest(content) in known.get(name, _UNKNOWN)['digests']:
        continue
      local.parent.mkdir(parents=True, exist_ok=True)
      with files.whole(local, 'wb') as file:
        file.write(content)
      known[name] = {'state': _state(local), 'digests': [_digest(content)]}
    for name in known.keys() - there.keys():
      if known[name]['state'] is not None:  # was in the bucket once
        (workdir / name).unlink(missing_ok=True)
    files.write_json(workdir / _PUSHED, {name: record for name, record in known.items() if name in there})


def _files(source: epath.Path, under: str = ''):
  """(name, path) of each file of a run in a bucket, checkpoints apart."""
  for path in source.iterdir():
    if path.is_dir() and path.name != 'checkpoints':
      yield from _files(path, f'{under}{path.name}/')
    elif path.name and not path.is_dir():
      yield f'{under}{path.name}', path


def _known(workdir: pathlib.Path) -> dict[str, dict]:
  """Of each file that was copied, {'state', 'digests'}.

  state: its `_state` when it was known to be in the bucket; None: never. digests: `_digest` of all that the bucket may
  hold of it from here: what was known to be there, and what was tried since.
  """
  path = workdir / _PUSHED
  found = files.read_json(path) if path.is_file() else {}
  return {name: record for name, record in found.items() if isinstance(record, dict)}  # once they were lists


def push(workdir: pathlib.Path):
  """Copies what process 0 changed in the local folder of a run to the bucket, if it has one. Raises UserError."""
  if not is_mirror(workdir) or not distributed.primary():
    return
  remote = checkpoints(workdir).parent
  with _explained(f'{workdir} cannot be copied to {remote}'):
    known = _known(workdir)
    try:
      for name in _own(workdir):
        state, record = _state(workdir / name), known.get(name, _UNKNOWN)
        if record['state'] != state:
          content, target = (workdir / name).read_bytes(), remote / name
          known[name] = record | {'digests': [*record['digests'], _digest(content)]}
          files.write_json(workdir / _PUSHED, known)  # it may arrive, and we not hear of it
          target.parent.mkdir(parents=True, exist_ok=True)
          target.write_bytes(content)
          known[name] = {'state': state, 'digests': [_digest(content)]}
    finally:
      files.write_json(workdir / _PUSHED, known)


def keep_up(workdir: pathlib.Path, then: str = 'The run goes on, and tries again.'):
  """`push` that may fail: the next one copies the same; `then`: when that is."""
  try:
    push(workdir)
  except UserError as e:
    logging.warning('%s %s', e, then)


@contextlib.contextmanager
def mirrored(workdir: pathlib.Path):
  """The local folder of a run in a bucket as that is at the start, and the bucket as the folder is at the end."""
  if not is_mirror(workdir) or not distributed.primary():
    yield
    return
  pull(workdir)
  try:
    yield
  except BaseException:
    keep_up(workdir, 'The same command on this machine tries again.')  # the error of the run is the one to read
    raise
  push(workdir)


def _own(workdir: pathlib.Path) -> list[str]:
  """The files that go to the bucket."""
  apart = (POINTER, _PUSHED, _LOCK)
  return [p.relative_to(workdir).as_posix() for p in sorted(workdir.rglob('*'))
          if p.is_file() and p.name not in apart and not p.name.endswith('.tmp')]


def _state(path: pathlib.Path) -> list[int]:
  """[bytes, nanoseconds of the last change]: tells whether a file was changed without reading it."""
  return [path.stat().st_size, path.stat().st_mtime_ns]


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _explained(what: str):
  """Clients of a bucket raise whatever they like."""
  try:
    yield
  except UserError:
    raise
  except Exception as e:
    cause = ' '.join(str(e).split()) or type(e).__name__
    raise UserError(f'{what}: {cause[:300]}') from e
