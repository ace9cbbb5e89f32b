"""The hash of a source's content. Files that did not change since they were last read are not read again."""

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
import time
from collections.abc import Sequence

from lns_jax import files
from lns_jax.errors import UserError

# A file changed this lately might change again without a new time stamp, so its hash is not remembered.
SETTLED_SECONDS = 2.0


def of_files(files: Sequence[tuple[str, pathlib.Path]], memo_path: pathlib.Path) -> str:
  """sha256 (hex) over names and contents of all files.

  Args:
    files: (name, path). memo_path: JSON with hashes of files by path, size and time of change.
  """
  memo = {}
  with contextlib.suppress(OSError, ValueError):  # absent or damaged: all files are read
    memo = json.loads(memo_path.read_text())
  fresh = {}

  def one(entry):
    name, path = entry
    stat = path.stat()
    key = f'{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}'
    digest = memo.get(key) or of_file(path)
    if key not in memo and time.time() - stat.st_mtime > SETTLED_SECONDS:
      fresh[key] = digest
    return f'{name}\n{digest}\n'

  try:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      total = hashlib.sha256(''.join(pool.map(one, files)).encode()).hexdigest()
  except OSError as error:
    raise UserError(f'{error.filename} cannot be read: {error.strerror}.') from None
  if fresh:
    _remember(memo | fresh, memo_path)
  return total


def of_file(path: pathlib.Path) -> str:
  """sha256 (hex) of a file's content."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _remember(memo: dict, path: pathlib.Path) -> None:
  """Writes the memo; a reader sees the old or the new one. Losing it costs only time."""
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, memo)
