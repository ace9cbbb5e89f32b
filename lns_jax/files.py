"""Files that are either whole or as they were, and JSON that every reader accepts."""

import contextlib
import errno
import glob
import json
import math
import os
import pathlib
import re
import shutil
import signal
import threading

import numpy as np

from lns_jax.errors import UserError

LONGEST = 255  # bytes in a name, on every common file system
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def absolute(path) -> pathlib.Path:
  """The absolute path, ~ expanded. Raises UserError for what no file can be named."""
  shown = repr(str(path) if len(str(path)) <= 80 else f'{str(path)[:77]}...')
  try:
    path = pathlib.Path(path).expanduser().absolute()
  except RuntimeError:
    raise UserError(f'{shown} is in the home of a user that there is not.') from None
  if '\0' in str(path):
    raise UserError(f'{shown} is not a path: it holds a NUL character.')
  longest = max(path.parts, key=lambda part: len(os.fsencode(part)))
  if len(os.fsencode(longest)) > LONGEST:
    raise UserError(f'{shown} is not a path: a name in it has {len(os.fsencode(longest))} bytes, {LONGEST} at most.')
  return path


def cache_folder() -> pathlib.Path:
  """$LNS_JAX_CACHE, else lns_jax in the user's cache folder."""
  given = os.environ.get('LNS_JAX_CACHE')
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(given).expanduser() if given else pathlib.Path(base) / 'lns_jax'


@contextlib.contextmanager
def whole(path: pathlib.Path, mode: str = 'w', **kwargs):
  """A file to write to, as of `open`, that is either whole or as before, also after a kill or a power cut."""
  partial = path.with_name(path.name + '.tmp')
  with open(partial, mode, **kwargs) as file:
    yield file
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)


@contextlib.contextmanager
def in_one_sentence(failure: str, kind: type[Exception], comfort: str = ''):
  """Turns an error of a kind into a UserError: what failed, the cause, what helps."""
  try:
    yield
  except kind as e:
    raise UserError(f'{failure}: {cause(e)}{comfort}.') from e


def cause(error: Exception) -> str:
  """The operating system's words for why a file could not be written or read, if there are any."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  code = re.search(r"os_error_code='(\d+)'", str(error))  # as TensorStore reports it
  return os.strerror(int(code[1])) if code else (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def disk_explained(folder: pathlib.Path, comfort: str):
  """Turns the error of a disk that is full or fails into a UserError: where, why, what is true all the same."""
  try:
    yield
  except OSError as e:
    if e.errno not in _OF_DISKS:
      raise
    done = 'written or read' if e.errno == errno.EIO else 'written'
    raise UserError(f'{e.filename or folder} could not be {done}: {cause(e)}; {comfort}.') from e


def unused(out) -> pathlib.Path:
  """The absolute path of a file or folder that can be made. Raises UserError when it exists or there is no way to."""
  if '://' in str(out):
    raise UserError(f'{out} is not on a local disk; write there and copy it.')
  path = absolute(out)
  absolute(unfinished(path))  # a longer name
  if os.path.lexists(path):
    raise UserError(f'{path} exists, and nothing is written over it; give a path where nothing is.')
  above = next(p for p in path.parents if p.exists())
  if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
    raise UserError(f'{path} cannot be made: {above} is not a folder that can be written to.')
  return path


@contextlib.contextmanager
def whole_folder(path: pathlib.Path):
  """A folder to fill, which becomes `path` at the end; otherwise as `whole_path`."""
  with whole_path(path) as partial:
    partial.mkdir()
    yield partial


@contextlib.contextmanager
def whole_path(path: pathlib.Path):
  """A name for a file or folder to write, which becomes `path` at the end. Raises OSError.

  After an error, Ctrl-C or SIGTERM nothing is left of it, nor of folders above that were not there; what a killed
  process left of the same path is removed first.
  """
  for left in path.parent.glob(glob.escape(path.name) + '.unfinished-*'):
    if not _alive(left.name.rpartition('-')[2]):
      _remove(left)
  partial = unfinished(path)
  made = [folder for folder in path.parents if not folder.exists()]  # from the lowest up
  with _terminable():
    try:
      partial.parent.mkdir(parents=True, exist_ok=True)
      yield partial
      os.rename(partial, path)
    except BaseException:
      _remove(partial)
      with contextlib.suppress(OSError):  # somebody else has put something there
        for folder in made:
          folder.rmdir()
      raise


def _remove(path: pathlib.Path):
  """Removes a file or a folder as far as that can be done."""
  shutil.rmtree(path, ignore_errors=True)  # of a file it does nothing
  with contextlib.suppress(OSError):
    path.unlink()


def unfinished(path: pathlib.Path) -> pathlib.Path:
  """What this process calls a file or folder while it is written."""
  return path.with_name(f'{path.name}.unfinished-{os.getpid()}')


def _alive(pid: str) -> bool:
  """Whether there is such a process, or what is asked for is none."""
  try:
    os.kill(int(pid), 0)
  except (ProcessLookupError, OverflowError):
    return False
  except (ValueError, PermissionError):  # not ours to judge; somebody else's
    return True
  return True


@contextlib.contextmanager
def _terminable():
  """SIGTERM ends the program as an exception, with the code of a shell, unless it is dealt with already."""
  if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
    yield
    return
  def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break off the clearing up
    raise SystemExit(128 + signal.SIGTERM)
  signal.signal(signal.SIGTERM, end)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def write_text(path: pathlib.Path, text: str):
  """Writes a text file, see `whole`."""
  with whole(path, encoding='utf-8') as file:
    file.write(text)


def write_json(path: pathlib.Path, value):
  """`write_text` of indented JSON. Raises ValueError for NaN and infinity: see `finite`."""
  write_text(path, json.dumps(value, indent=1, allow_nan=False) + '\n')


def read_json(path: pathlib.Path, mend: str = '') -> dict:
  """A JSON object. Raises UserError when there is none, which ends with how to mend it."""
  behind = f'; {mend}.' if mend else '.'
  try:
    found = json.loads(path.read_text(encoding='utf-8-sig'))
  except OSError as e:
    raise UserError(f'{path} cannot be read: {e.strerror or e}{behind}') from None
  except (ValueError, RecursionError) as e:
    raise UserError(f'{path} is not JSON: {e}{behind}') from None
  if not isinstance(found, dict):
    raise UserError(f'{path} is not a JSON object but {type(found).__name__}{behind}')
  return found


def finite(value):
  """JSON has no NaN: non-finite numbers become None, arrays and tuples become lists."""
  if isinstance(value, dict):
    return {k: finite(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)) or np.ndim(value):
    return [finite(v) for v in value]
  if isinstance(value, (bool, str, int)) or value is None:
    return value
  value = float(value)
  return value if math.isfinite(value) else None
