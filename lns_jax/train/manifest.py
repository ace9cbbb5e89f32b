"""A list of the size and SHA-256 of every file of a checkpoint step, and the check of a step against it.

Orbax restores a step whose bytes were overwritten, cut or emptied without a word, or with a wrong one: this
list is what notices. It is written after the step's last file and is itself protected by a digest.
"""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Iterator

from etils import epath

NAME = 'manifest.json'

_CHUNK = 1 << 20  # bytes: large enough that hashlib lets other threads run, small enough for any memory


def _files(folder: epath.Path) -> Iterator[epath.Path]:
  for path in folder.iterdir():
    if path.is_dir():
      yield from _files(path)
    else:
      yield path


def _sha256(path: epath.Path) -> str:
  digest = hashlib.sha256()
  with path.open('rb') as f:
    while chunk := f.read(_CHUNK):
      digest.update(chunk)
  return digest.hexdigest()


def _hash_all(paths: list[epath.Path]) -> list[str]:
  with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1), 'checksum') as pool:
    return list(pool.map(_sha256, paths))


def _digest(files: dict) -> str:
  return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def write(folder: epath.PathLike, *, checksums: bool = True):
  """Lists every file below `folder` in `folder/manifest.json`: there whole or not at all, whenever it is killed.

  Without `checksums` only sizes are listed.
  """
  folder = epath.Path(folder)
  paths = sorted(p for p in _files(folder) if p != folder / NAME)
  sums = _hash_all(paths) if checksums else [None] * len(paths)
  files = {p.relative_to(folder).as_posix(): {'size': p.stat().length, 'sha256': s} for p, s in zip(paths, sums)}
  # What is written to a bucket is there when all of it is; on a disk the last step is a new name.
  part = folder / (NAME if '://' in os.fspath(folder) else f'{NAME}.part')
  part.write_text(json.dumps({'files': files, 'digest': _digest(files)}, indent=1))
  if part.name != NAME:
    part.replace(folder / NAME)


def damage(folder: epath.PathLike, *, checksums: bool = True, under: str = '') -> str:
  """What is wrong with `folder` against its manifest, naming the file; '' when nothing is.

  The sizes of all files are compared first, which costs next to nothing, then, with `checksums`, the SHA-256 of
  those in the subfolder `under` ('': all). A manifest that lists no checksums is compared by size alone.
  """
  folder = epath.Path(folder)
  try:
    manifest = json.loads((folder / NAME).read_text())
    files = manifest['files']
    sound = manifest['digest'] == _digest(files)
  except FileNotFoundError:
    return f'{NAME} is missing'
  except (ValueError, KeyError, TypeError):
    sound = False
  if not sound:
    return f'{NAME} is damaged'
  for name, file in files.items():
    path = folder / name
    if not path.exists():
      return f'{name} is missing'
    if (size := path.stat().length) != file['size']:
      return f'{name} has {size} bytes where {file["size"]} were written'
  names = [n for n, f in files.items() if f['sha256'] and n.startswith(f'{under}/' if under else '')]
  for name, found in zip(names, _hash_all([folder / n for n in names]) if checksums else ()):
    if found != files[name]['sha256']:
      return f'{name} does not match its checksum'
  return ''
