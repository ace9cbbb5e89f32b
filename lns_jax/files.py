"""Files that are either whole or as they were, and JSON that every reader accepts."""

import contextlib
import json
import math
import os
import pathlib
import shutil

import numpy as np

from lns_jax.errors import UserError

LONGEST = 255  # bytes in a name, on every common file system


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
def whole_folder(path: pathlib.Path):
  """A folder to fill, which becomes `path` at the end; after an error nothing is left of it. Raises OSError."""
  partial = path.with_name(f'{path.name}.unfinished-{os.getpid()}')
  partial.mkdir(parents=True)
  try:
    yield partial
    os.rename(partial, path)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def write_text(path: pathlib.Path, text: str):
  """Writes a text file, see `whole`."""
  with whole(path, encoding='utf-8') as file:
    file.write(text)


def write_json(path: pathlib.Path, value):
  """`write_text` of indented JSON. Raises ValueError for NaN and infinity: see `finite`."""
  write_text(path, json.dumps(value, indent=1, allow_nan=False) + '\n')


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
