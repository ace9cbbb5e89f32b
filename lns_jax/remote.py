"""Run folders in a bucket, gs://BUCKET/RUN.

Checkpoints are written to and read from the bucket directly. The other files of a run are small, and some grow line by
line, which no bucket allows: they lie in a local folder, which process 0 copies to the bucket at every save and
evaluation and at the end, and from there when a run goes on, on whatever machine. That folder is a run folder like any
other, but for a file `checkpoints.url` in place of its folder `checkpoints`.

No lock keeps two machines from one folder in a bucket: `resume.alone` holds the local one.
"""

import contextlib
import pathlib

from absl import logging
from etils import epath

from lns_jax import distributed, files
from lns_jax.errors import UserError

POINTER, _PUSHED, _LOCK = 'checkpoints.url', '.pushed.json', '.lock'


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
  """Makes the local folder of a run in a bucket what that is, checkpoints apart. Raises UserError."""
  remote = checkpoints(workdir).parent
  with _explained(f'{remote} cannot be copied to {workdir}'):
    there = dict(_files(remote)) if remote.exists() else {}
    for name, path in there.items():
      (workdir / name).parent.mkdir(parents=True, exist_ok=True)
      with files.whole(workdir / name, 'wb') as file:
        file.write(path.read_bytes())
    for name in _known(workdir).keys() - there.keys():  # was in the bucket once
      (workdir / name).unlink(missing_ok=True)
    states = _states(workdir)
    files.write_json(workdir / _PUSHED, {name: states[name] for name in there if name in states})


def _files(source: epath.Path, under: str = ''):
  """(name, path) of each file of a run in a bucket, checkpoints apart."""
  for path in source.iterdir():
    if path.is_dir() and path.name != 'checkpoints':
      yield from _files(path, f'{under}{path.name}/')
    elif path.name and not path.is_dir():
      yield f'{under}{path.name}', path


def _known(workdir: pathlib.Path) -> dict[str, list[int]]:
  """Of the files that are in the bucket, in what state they were copied, as of `_states`."""
  path = workdir / _PUSHED
  return files.read_json(path) if path.is_file() else {}


def push(workdir: pathlib.Path):
  """Copies what process 0 changed in the local folder of a run to the bucket, if it has one. Raises UserError."""
  if not is_mirror(workdir) or not distributed.primary():
    return
  remote = checkpoints(workdir).parent
  with _explained(f'{workdir} cannot be copied to {remote}'):
    known = _known(workdir)
    for name, state in _states(workdir).items():
      if known.get(name) != state:
        target = remote / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((workdir / name).read_bytes())
        known[name] = state
    files.write_json(workdir / _PUSHED, known)


def keep_up(workdir: pathlib.Path):
  """`push` in the middle of a run, which goes on when that fails: the next one copies the same."""
  try:
    push(workdir)
  except UserError as e:
    logging.warning('%s The run goes on, and tries again.', e)


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
    keep_up(workdir)  # the error is the one to read
    raise
  push(workdir)


def _states(workdir: pathlib.Path) -> dict[str, list[int]]:
  """{file: [bytes, nanoseconds of its last change]} of what goes to the bucket."""
  own = (POINTER, _PUSHED, _LOCK)
  paths = [p for p in sorted(workdir.rglob('*')) if p.is_file() and p.name not in own and not p.name.endswith('.tmp')]
  return {p.relative_to(workdir).as_posix(): [p.stat().st_size, p.stat().st_mtime_ns] for p in paths}


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
