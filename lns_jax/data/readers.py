"""Reading one part of a source: an iterator of documents, each an id and its text or token ids in chunks.

A part is the unit of work of preparation: a file or a range of one. The id of a document is its place in
the source, so that the split by hash does not depend on how the work was divided.
"""

import codecs
import dataclasses
import io
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from lns_jax.errors import UserError, nearest

CHUNK_BYTES = 1 << 20
CHUNK_IDS = 1 << 20
COMPRESSIONS = {'.gz': 'gzip', '.zst': 'zstd', '.bz2': 'bz2', '.lz4': 'lz4'}


@dataclasses.dataclass(frozen=True)
class Part:
  """A file or a range of one.

  Attributes:
    kind: a row of `READERS`. path: the file (for tfds: the builder's folder). name: how it is named in ids.
    split: 'train' or 'validation'; empty: documents are split by the hash of their id.
    start, stop: range in bytes, records, row groups; stop 0: to the end. size: bytes, for progress.
    budget: whole documents are taken while their tokens sum up to at most this; 0: all.
  """

  kind: str
  path: str
  name: str
  split: str = ''
  start: int = 0
  stop: int = 0
  size: int = 0
  budget: int = 0


@dataclasses.dataclass(frozen=True)
class Document:
  """One document. `chunks`: str, or int32 arrays of token ids, to be read once and in order."""

  id: str
  chunks: Iterable[str | np.ndarray]


def read(part: Part, text_field: str, eos_id: int | None, counts: Counter) -> Iterator[Document]:
  """The documents of a part in order.

  Args:
    counts: 'non_utf8' is raised by the documents in which broken bytes were replaced by U+FFFD.

  Raises:
    UserError: for a damaged file or record, naming the file and where in it.
  """
  return READERS[part.kind](part, text_field, eos_id, counts)


def decode(raw: bytes, counts: Counter) -> str:
  """Bytes as text; broken UTF-8 is replaced and counted."""
  try:
    return raw.decode()
  except UnicodeDecodeError:
    counts['non_utf8'] += 1
    return raw.decode(errors='replace')


def open_binary(path) -> io.BufferedReader:
  """A file, decompressed by its suffix; a cut-off or damaged one raises OSError while it is read."""
  compression = COMPRESSIONS.get(pathlib.Path(path).suffix)
  if compression is None:
    return open(path, 'rb')
  import pyarrow
  return io.BufferedReader(pyarrow.input_stream(str(path), compression=compression), CHUNK_BYTES)


def _damaged(path, where: str, error: Exception) -> UserError:
  reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip('.')
  return UserError(f'{path} is damaged {where}: {reason}.')


def _text(part: Part, text_field: str, eos_id: int | None, counts: Counter) -> Iterator[Document]:
  """A text file is one document; where its tail is held out, a part is a range of it."""
  def chunks():
    decoder, done = codecs.getincrementaldecoder('utf-8')(), 0
    with open_binary(part.path) as file:
      if part.start:
        file.seek(part.start)
      while True:
        try:
          raw = file.read(min(CHUNK_BYTES, part.stop - part.start - done) if part.stop else CHUNK_BYTES)
        except (OSError, EOFError) as error:
          raise _damaged(part.path, f'after {done} bytes of text', error) from None
        state = decoder.getstate()
        try:
          text = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError:
          counts['non_utf8'] += 1
          decoder.errors = 'replace'
          decoder.setstate(state)
          text = decoder.decode(raw, final=not raw)
        yield text.removeprefix('\ufeff') if not done else text
        done += len(raw)
        if not raw:
          return
  yield Document(part.name, chunks())


def _lines(part: Part) -> Iterator[tuple[int, bytes]]:
  """(byte offset, line) of the lines that start in the part's range."""
  with open_binary(part.path) as file:
    at = part.start
    if at:
      file.seek(at - 1)
      at += len(file.readline()) - 1
    while not part.stop or at < part.stop:
      try:
        line = file.readline()
      except (OSError, EOFError) as error:
        raise _damaged(part.path, f'in line {_line_number(part.path, at)}', error) from None
      if not line:
        return
      yield at, line
      at += len(line)


def _line_number(path, offset: int) -> int:
  """1-based number of the line that starts at `offset`; counted only when something is wrong."""
  lines = 1
  with open_binary(path) as file:
    while offset > 0:
      block = file.read(min(CHUNK_BYTES, offset))
      lines, offset = lines + block.count(b'\n'), offset - len(block)
  return lines


def _jsonl(part: Part, text_field: str, eos_id: int | None, counts: Counter) -> Iterator[Document]:
  """One JSON object a line; C4's `.json.gz` are this."""
  for at, line in _lines(part):
    if line.isspace():
      continue
    try:
      record = json.loads(decode(line, counts))
    except json.JSONDecodeError as error:
      raise UserError(f'{part.path} line {_line_number(part.path, at)} is not a JSON object: {error}.') from None
    if not isinstance(record, dict):
      raise UserError(f'{part.path} line {_line_number(part.path, at)} is not a JSON object but '
                      f'{type(record).__name__}; one object a line is needed.')
    if not isinstance(record.get(text_field), str | None):
      raise UserError(f'{part.path} line {_line_number(part.path, at)}: field {text_field!r} is not text but '
                      f'{type(record[text_field]).__name__}.')
    if text_field not in record:
      raise UserError(f'{part.path} line {_line_number(part.path, at)} has no field {text_field!r}.'
                      f'{nearest(text_field, record)}')
    yield Document(f'{part.name}:{at}', [record[text_field] or ''])


def _parquet(part: Part, text_field: str, eos_id: int | None, counts: Counter) -> Iterator[Document]:
  import pyarrow
  import pyarrow.parquet
  index = 0
  try:
    file = pyarrow.parquet.ParquetFile(part.path)
    index = sum(file.metadata.row_group(g).num_rows for g in range(part.start))
    batches = file.iter_batches(256, row_groups=range(part.start, part.stop), columns=[text_field])
    for batch in batches:
      for raw in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
        yield Document(f'{part.name}:{index}', ['' if raw is None else decode(raw, counts)])
        index += 1
  except (OSError, pyarrow.ArrowException) as error:
    raise _damaged(part.path, f'near row {index}', error) from None


def _tfds(part: Part, text_field: str, eos_id: int | None, counts: Counter) -> Iterator[Document]:
  """Records of a prepared TFDS set in array_record."""
  import tensorflow_datasets as tfds
  split, name = part.name.split(':')[-1], part.name
  records = tfds.builder_from_directory(part.path).as_data_source(split)
  for start in range(part.start, part.stop, 64):
    indices = range(start, min(start + 64, part.stop))
    for index, record in zip(indices, records.__getitems__(list(indices)), strict=True):
      yield Document(f'{name}:{index}', [decode(_field(record, text_field, name, index), counts)])


def _field(record: dict, text_field: str, name: str, index: int) -> bytes:
  if text_field not in record:
    raise UserError(f'record {index} of {name} has no field {text_field!r}.{nearest(text_field, record)}')
  return record[text_field]


Reader = Callable[[Part, str, int | None, Counter], Iterator[Document]]
READERS: dict[str, Reader] = {'text': _text, 'jsonl': _jsonl, 'parquet': _parquet, 'tfds': _tfds}
