"""Safetensors files of a folder: one, or shards of at most a given size with the index that names them."""

import re
from collections.abc import Callable, Mapping

import numpy as np

from lns_jax import files
from lns_jax.errors import UserError
from lns_jax.interop.weights import INDEX, WHOLE

UNITS = {'B': 1, 'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'KIB': 2**10, 'MIB': 2**20, 'GIB': 2**30}


def size(text: str) -> int:
  """'5GB' -> 5 * 10^9 bytes; KiB, MiB, GiB are powers of 1024. Raises UserError for what is no size."""
  found = re.fullmatch(r'\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?I?B)\s*', text.upper())
  bytes_ = int(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else 0
  if not bytes_:
    raise UserError(f'--shard_size={text} is not a size; 5GB is one, with a unit of B, kB, MB, GB, KiB, MiB or GiB.')
  return bytes_


def plan(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
  """Names of tensors in their order, in groups of at most `limit` bytes; a larger tensor is alone."""
  groups, room = [], 0
  for name, bytes_ in sizes.items():
    if not groups or bytes_ > room:
      groups.append([])
      room = limit
    groups[-1].append(name)
    room -= bytes_
  return groups


def write(folder, shapes: Mapping[str, tuple[int, ...]], get: Callable[[str], np.ndarray], dtype: np.dtype, limit: int):
  """Writes every tensor into an empty folder, one file's tensors in memory at a time.

  Args:
    shapes: of each tensor, in the order of the files.
    get: name -> the tensor of type `dtype`.

  Returns:
    Names of the files.

  Raises:
    OSError: a file cannot be written.
  """
  import safetensors.numpy
  sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, shape in shapes.items()}
  groups = plan(sizes, limit)
  names = [WHOLE] if len(groups) == 1 else [
      WHOLE.replace('.', f'-{i:05d}-of-{len(groups):05d}.', 1) for i in range(1, len(groups) + 1)]
  for file, group in zip(names, groups, strict=True):
    # The library writes what lies in memory, whatever the strides say.
    tensors = {name: np.ascontiguousarray(get(name)) for name in group}
    try:
      safetensors.numpy.save_file(tensors, folder / file, metadata={'format': 'pt'})
    except safetensors.SafetensorError as e:  # a full disk, in its own words
      raise OSError(f'{file}: {e}') from None
    (folder / file).chmod(0o644)  # as other files have it; the library lets nobody else read
  if len(names) > 1:
    where = {name: file for file, group in zip(names, groups, strict=True) for name in group}
    files.write_json(folder / INDEX, {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': where})
  return names
