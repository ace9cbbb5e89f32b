"""The container of a GGUF file: its metadata and where its tensors lie.

The `gguf` library's own reader makes several numpy views of every token and merge of the vocabulary (seconds for a
small model) and trusts every count of the file, so that a damaged one can keep it busy for ever. This reads the header
once and checks each length against the file; the library knows the types and turns blocks into numbers.
"""

import math
import mmap
import pathlib
import re
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lns_jax.errors import UserError

# Value types of the format: struct code of the numbers; 8 is text, 9 an array.
_NUMBERS = dict(enumerate('BbHhIif?')) | {10: 'Q', 11: 'q', 12: 'd'}
_TEXT, _ARRAY = 8, 9
_PLAIN = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16, 'F64': np.float64}
# Numbers that are made from blocks at a time, so that little beside the result is ever held.
_CHUNK = 1 << 20


class Tensor(NamedTuple):
  """One tensor as it lies in the file.

  Attributes:
    shape: as numpy has it, rows first (the file has it reversed).
    kind: the library's GGMLQuantizationType.
    data: uint8 [rows, bytes of a row], a view of the mapped file.
  """

  shape: tuple[int, ...]
  kind: Any
  data: np.ndarray

  def read(self) -> np.ndarray:
    """The numbers: as stored where they are floats, float32 where they are packed in blocks."""
    if self.kind.name in _PLAIN:
      return self.data.view(_PLAIN[self.kind.name]).reshape(self.shape)
    from gguf import quants
    rows = max(1, _CHUNK // self.shape[-1])
    out = np.empty((len(self.data), self.shape[-1]), np.float32)
    for at in range(0, len(out), rows):
      out[at:at + rows] = quants.dequantize(self.data[at:at + rows], self.kind)
    return out.reshape(self.shape)


class File(NamedTuple):
  """What GGUF files hold: {key: number, text, list or array} and {name: Tensor}."""

  metadata: dict[str, Any]
  tensors: dict[str, Tensor]


def read(path) -> File:
  """Opens a GGUF file, or all files of one that was split, from the first of them.

  Raises:
    UserError: not a GGUF file, of a version or byte order not known, damaged, cut short, or a file of several that is
      not the first or lacks another.
  """
  path = pathlib.Path(path)
  _library()
  first = _read_one(path)
  count = first.metadata.get('split.count', 0)
  if not isinstance(count, int) or count <= 1:
    return first
  found = re.fullmatch(r'(.*)-(\d{5})-of-(\d{5})\.gguf', path.name)
  if first.metadata.get('split.no', 0) != 0 or not found:
    raise UserError(f'{path} is one of {count} files of a model; give the first, NAME-00001-of-{count:05d}.gguf.')
  tensors = dict(first.tensors)
  for number in range(2, count + 1):
    tensors |= _read_one(path.with_name(f'{found[1]}-{number:05d}-of-{count:05d}.gguf')).tensors
  expected = first.metadata.get('split.tensors.count', len(tensors))
  if len(tensors) != expected:
    raise UserError(f'{path} and its {count - 1} other files hold {len(tensors)} tensors instead of {expected}.')
  return File(first.metadata, tensors)


def _library():
  try:
    import gguf
  except ImportError:
    raise UserError("GGUF files need the package gguf: pip install 'lns_jax[gguf]'.") from None
  return gguf


def _read_one(path: pathlib.Path) -> File:
  if not path.is_file():
    raise UserError(f'{path} is not a file.')
  with open(path, 'rb') as f:
    if f.read(4) != b'GGUF':
      raise UserError(f'{path} is not a GGUF file: it does not begin with the letters GGUF.')
    data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
  version = struct.unpack('<I', data[4:8].ljust(4, b'\0'))[0]
  if version not in (2, 3):
    order = ' (or of big-endian byte order)' if version & 0xffff == 0 else ''
    raise UserError(f'{path} is of GGUF version {version}{order}; known are 2 and 3.')
  try:
    return _Reader(data).file()
  except (struct.error, UnicodeDecodeError, ValueError, KeyError, RecursionError) as error:
    raise UserError(f'{path} is damaged or cut short: {str(error).rstrip(".")}.') from None


class _Reader:
  """Reads values one after the other."""

  def __init__(self, data: mmap.mmap):
    self.data, self.at = data, 8

  def room(self, size: int):
    """Refuses a length that the file does not have: a damaged count must not become work or memory."""
    if size > len(self.data) - self.at:
      raise ValueError(f'{size} bytes are said to follow byte {self.at} and there are {len(self.data) - self.at}')

  def number(self, code: str):
    value, = struct.unpack_from('<' + code, self.data, self.at)
    self.at += struct.calcsize('<' + code)
    return value

  def text(self) -> str:
    size = self.number('Q')
    self.room(size)
    self.at += size
    return self.data[self.at - size:self.at].decode()

  def value(self, kind: int):
    if kind == _TEXT:
      return self.text()
    if kind != _ARRAY:
      return self.number(_NUMBERS[kind])
    kind, count = self.number('I'), self.number('Q')
    if kind in _NUMBERS:
      dtype = np.dtype(_NUMBERS[kind])
      self.room(count * dtype.itemsize)
      self.at += count * dtype.itemsize
      return np.frombuffer(self.data, dtype, count, self.at - count * dtype.itemsize)
    self.room(8 * count)
    return [self.value(kind) for _ in range(count)]

  def file(self) -> File:
    tensors, pairs = self.number('Q'), self.number('Q')
    metadata = {}
    for _ in range(pairs):
      key = self.text()
      metadata[key] = self.value(self.number('I'))
    infos = []
    for _ in range(tensors):
      name, dims = self.text(), self.number('I')
      self.room(8 * dims)
      infos.append((name, [self.number('Q') for _ in range(dims)][::-1], self.number('I'), self.number('Q')))
    align = metadata.get('general.alignment', 32)
    if not isinstance(align, int) or align < 1:
      raise ValueError(f'general.alignment is {align}')
    start = -(-self.at // align) * align
    return File(metadata, {name: self.tensor(name, tuple(shape), kind, start + offset)
                           for name, shape, kind, offset in infos})

  def tensor(self, name: str, shape: tuple[int, ...], kind: int, at: int) -> Tensor:
    library = _library()
    kind = library.GGMLQuantizationType(kind)
    block, block_bytes = library.GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
      raise ValueError(f'tensor {name} of shape {shape} is not made of blocks of {block}')
    width, rows = shape[-1] // block * block_bytes, math.prod(shape[:-1])
    if at + rows * width > len(self.data):
      raise ValueError(f'tensor {name} ends at byte {at + rows * width} and the file has {len(self.data)}')
    return Tensor(shape, kind, np.frombuffer(self.data, np.uint8, rows * width, at).reshape(rows, width))
