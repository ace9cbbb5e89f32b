"""Reading one part of a source: an iterator of documents, each an id and its text or token ids in chunks.

The id of a document is its place in the source, so that the split by hash does not depend on how the work
was divided into parts.
"""

import codecs
import dataclasses
import io
import itertools
import json
import pathlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from lns_jax.errors import UserError, nearest

CHUNK_BYTES = 1 << 20
CHUNK_IDS = 1 << 18
COMPRESSIONS = {'.gz': 'gzip', '.zst': 'zstd', '.bz2': 'bz2', '.lz4': 'lz4'}


@dataclasses.dataclass(frozen=True)
class Slice:
  """A file or a range of one.

  Attributes:
    kind: a row of `READERS`. path: the file (for tfds: the builder's folder). name: how it is named in ids.
    start, stop: range in bytes, records, row groups or ids, by kind; stop 0: to the end.
    size: bytes, for progress.
  """

  kind: str
  path: str
  name: str
  start: int = 0
  stop: int = 0
  size: int = 0


@dataclasses.dataclass(frozen=True)
class Part:
  """The unit of work and of resuming: consecutive slices that are packed together.

  Attributes:
    split: 'train' or 'validation'; empty: documents are split by the hash of their id.
    budget: whole documents are taken while their tokens sum up to at most this; 0: all.
  """

  slices: tuple[Slice, ...]
  split: str = ''
  budget: int = 0

  @property
  def size(self) -> int:
    return sum(s.size for s in self.slices)


@dataclasses.dataclass(frozen=True)
class Document:
  """One document. `chunks`: str, or int32 arrays of token ids, to be read once and in order."""

  id: str
  chunks: Iterable[str | np.ndarray]


@dataclasses.dataclass(frozen=True)
class Options:
  """What readers need to know beside the slice: the field that holds text, and the EOS id of token shards."""

  text_field: str = 'text'
  eos_id: int | None = None


def read(part: Part, options: Options, counts: Counter) -> Iterator[Document]:
  """The documents of a part in order.

  Args:
    counts: 'non_utf8' is raised by the documents in which broken bytes were replaced by U+FFFD.

  Raises:
    UserError: for a damaged file or record, naming the file and where in it.
  """
  for piece in part.slices:
    yield from READERS[piece.kind](piece, options, counts)


def decode(raw: bytes, counts: Counter) -> str:
  """Bytes as text; broken UTF-8 is replaced and counted."""
  try:
    return raw.decode()
  except UnicodeDecodeError:
    counts['non_utf8'] += 1
    return raw.decode(errors='replace')


def compression_of(path) -> str | None:
  """How a file is compressed, by its suffix."""
  return COMPRESSIONS.get(pathlib.Path(path).suffix.lower())


def open_binary(path) -> io.BufferedReader:
  """A file, decompressed by its suffix; a cut-off or damaged one raises OSError while it is read."""
  compression = compression_of(path)
  if compression is None:
    return open(path, 'rb')
  import pyarrow
  return io.BufferedReader(pyarrow.input_stream(str(path), compression=compression), CHUNK_BYTES)


def damaged(path, where: str, error: Exception) -> UserError:
  """One sentence of what a library said about a file."""
  reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip('.')
  return UserError(f'{path} is damaged {where}: {reason}.')


def _blocks(piece: Slice) -> Iterator[bytes]:
  """The bytes of a slice, a block at a time."""
  done = 0
  with open_binary(piece.path) as file:
    if piece.start:
      file.seek(piece.start)
    while True:
      try:
        raw = file.read(min(CHUNK_BYTES, piece.stop - piece.start - done) if piece.stop else CHUNK_BYTES)
      except OSError as error:
        raise damaged(piece.path, f'after {done} bytes of text', error) from None
      if not raw:
        return
      done += len(raw)
      yield raw


def _decoded(blocks: Iterable[bytes], counts: Counter) -> Iterator[str]:
  """Text of the blocks; the first broken byte of a document switches to replacing, and is counted once."""
  decoder = codecs.getincrementaldecoder('utf-8')()
  for index, raw in enumerate(itertools.chain(blocks, [b''])):
    try:
      text = decoder.decode(raw, final=not raw)
    except UnicodeDecodeError:
      counts['non_utf8'] += 1
      decoder.errors = 'replace'  # what it held back from the block before is still there
      text = decoder.decode(raw, final=not raw)
    yield text if index else text.removeprefix('\ufeff')


def _text(piece: Slice, options: Options, counts: Counter) -> Iterator[Document]:
  """A text file, or a range of it, is one document."""
  yield Document(piece.name, _decoded(_blocks(piece), counts))


def _lines(piece: Slice) -> Iterator[tuple[int, Callable[[], str], bytes]]:
  """(byte offset, words for its place, line) of the lines that start in the range."""
  with open_binary(piece.path) as file:
    at = piece.start
    if at:  # a line belongs to the range in which it starts
      file.seek(at - 1)
      at += len(file.readline()) - 1
    first = at
    for number in itertools.count(1):
      def place(number=number):
        return f'line {number + _lines_before(piece.path, first)}'
      if piece.stop and at >= piece.stop:
        return
      try:
        line = file.readline()
      except OSError as error:
        raise damaged(piece.path, f'in {place()}', error) from None
      if not line:
        return
      yield at, place, line
      at += len(line)


def _lines_before(path, offset: int) -> int:
  """Number of lines before a byte offset; counted only when something is wrong."""
  if not offset:
    return 0
  lines = 0
  with open(path, 'rb') as file:
    while offset > 0 and (block := file.read(min(CHUNK_BYTES, offset))):
      lines, offset = lines + block.count(b'\n'), offset - len(block)
  return lines


def _jsonl(piece: Slice, options: Options, counts: Counter) -> Iterator[Document]:
  """One JSON object a line; C4's `.json.gz` are this."""
  field = options.text_field
  for at, place, line in _lines(piece):
    if line.isspace():
      continue
    line = line if at else line.removeprefix(codecs.BOM_UTF8)
    try:
      record = json.loads(decode(line, counts))
    except (json.JSONDecodeError, RecursionError) as error:
      raise UserError(f'{piece.path} {place()} is not a JSON object: {error}.') from None
    if not isinstance(record, dict):
      raise UserError(f'{piece.path} {place()} is not a JSON object but {type(record).__name__}; '
                      f'one object a line is needed.')
    if field not in record:
      raise UserError(f'{piece.path} {place()} has no field {field!r}.{nearest(field, record)}')
    if not isinstance(record[field], str | None):
      raise UserError(f'{piece.path} {place()}: field {field!r} is not text but {type(record[field]).__name__}.')
    # A lone surrogate escape ("\ud800") is legal JSON and no text.
    text = (record[field] or '').encode(errors='surrogatepass')
    yield Document(f'{piece.name}:{at}', [decode(text, counts)])


def _parquet(piece: Slice, options: Options, counts: Counter) -> Iterator[Document]:
  """The text column of a range of row groups."""
  import pyarrow
  import pyarrow.parquet
  index = 0
  try:
    with pyarrow.parquet.ParquetFile(piece.path) as file:
      index = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
      groups = range(piece.start, piece.stop)
      for batch in file.iter_batches(256, row_groups=groups, columns=[options.text_field]):
        for raw in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
          yield Document(f'{piece.name}:{index}', ['' if raw is None else decode(raw, counts)])
          index += 1
  except (OSError, pyarrow.ArrowException) as error:
    raise damaged(piece.path, f'near row {index}', error) from None


def _tfds(piece: Slice, options: Options, counts: Counter) -> Iterator[Document]:
  """Records of a prepared TFDS set in array_record; the name ends in the split."""
  import tensorflow_datasets as tfds
  records = tfds.builder_from_directory(piece.path).as_data_source(piece.name.split(':')[-1])
  for start in range(piece.start, piece.stop, 64):
    indices = range(start, min(start + 64, piece.stop))
    for index, record in zip(indices, records.__getitems__(list(indices)), strict=True):
      yield _record(piece, index, record, options, counts)


def _tfrecord(piece: Slice, options: Options, counts: Counter) -> Iterator[Document]:
  """One TFRecord file of a prepared TFDS set (TFDS's default, for which its own reader needs TensorFlow).

  A record is its length (uint64), a checksum of it, the data, a checksum of the data.
  """
  import tensorflow_datasets as tfds
  features = tfds.builder_from_directory(pathlib.Path(piece.path).parent).info.features
  with open(piece.path, 'rb') as file:
    for index in itertools.count():
      head = file.read(12)
      if not head:
        return
      data = file.read(struct.unpack('<Q', head[:8])[0] + 4) if len(head) == 12 else b''
      try:
        record = features.deserialize_example_np(data[:-4])
      except Exception as error:  # protobuf, TFDS and numpy each have their own
        raise damaged(piece.path, f'in record {index}', error) from None
      yield _record(piece, index, record, options, counts)


def _record(piece: Slice, index: int, record: dict, options: Options, counts: Counter) -> Document:
  field = options.text_field
  if field not in record:
    raise UserError(f'record {index} of {piece.name} has no field {field!r}.{nearest(field, record)}')
  if not isinstance(record[field], bytes):
    raise UserError(f'record {index} of {piece.name}: field {field!r} is not text but '
                    f'{type(record[field]).__name__}.')
  return Document(f'{piece.name}:{index}', [decode(record[field], counts)])


def open_ids(path) -> np.ndarray:
  """Token ids of a shard, memory-mapped: `.npy` (1-D, integer) or `.bin` (uint16, as nanoGPT writes it).

  Raises:
    UserError: if the file is neither.
  """
  path = pathlib.Path(path)
  try:
    ids = np.load(path, mmap_mode='r') if path.suffix == '.npy' else np.memmap(path, np.uint16, 'r')
  except (OSError, ValueError) as error:
    raise damaged(path, 'as a token shard', error) from None
  if ids.ndim != 1 or ids.dtype.kind not in 'iu':
    raise UserError(f'{path} is not a token shard: it holds {ids.dtype} of shape {ids.shape}, not integers [n].')
  return ids


def _tokens(piece: Slice, options: Options, counts: Counter) -> Iterator[Document]:
  """A token shard: a document ends after each EOS; without an EOS id the shard is one document."""
  ids = open_ids(piece.path)
  stop = piece.stop or len(ids)

  def chunks(start, end):
    for at in range(start, end, CHUNK_IDS):
      yield np.asarray(ids[at:min(at + CHUNK_IDS, end)], np.int64)

  begun = piece.start
  if options.eos_id is not None:
    for at in range(piece.start, stop, CHUNK_IDS):
      for end in at + np.flatnonzero(ids[at:min(at + CHUNK_IDS, stop)] == options.eos_id):
        yield Document(f'{piece.name}:{begun}', chunks(begun, int(end)))
        begun = int(end) + 1
  if begun < stop:
    yield Document(f'{piece.name}:{begun}', chunks(begun, stop))


READERS: dict[str, Callable[[Slice, Options, Counter], Iterator[Document]]] = {
    'text': _text, 'jsonl': _jsonl, 'parquet': _parquet, 'tfds': _tfds, 'tfrecord': _tfrecord, 'tokens': _tokens}
