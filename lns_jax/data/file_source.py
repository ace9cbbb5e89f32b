"""A file or a folder of text, JSON lines, Parquet or token shards."""

import pathlib

from lns_jax.config import DataConfig
from lns_jax.data import found, readers
from lns_jax.data.found import Found
from lns_jax.data.readers import Slice
from lns_jax.errors import UserError, nearest

KINDS = {
    '.txt': 'text', '.text': 'text', '.md': 'text', '.rst': 'text', '.tex': 'text', '.py': 'text',
    '.json': 'jsonl', '.jsonl': 'jsonl', '.ndjson': 'jsonl',
    '.parquet': 'parquet', '.npy': 'tokens', '.bin': 'tokens',
}
# With fewer expected validation documents than this, files are cut rather than drawn.
FEW_DOCUMENTS = 10


def find(path: pathlib.Path, data: DataConfig) -> Found:
  """Looks at a file or folder.

  Raises:
    UserError: if it does not exist, holds nothing that can be read, or mixes text with token shards.
  """
  if not path.exists():
    raise UserError(f'data.source = {str(path)!r} does not exist; known besides paths: embedded, tfds:NAME.')
  files, ignored = _files(path)
  if not files:
    raise UserError(f'{path} holds no file that can be read; known: {", ".join(KINDS)}, '
                    f'also with {", ".join(readers.COMPRESSIONS)}.')
  kinds = {kind: name for name, _, kind in files}
  if 'tokens' in kinds and len(kinds) > 1:
    other = next(name for kind, name in kinds.items() if kind != 'tokens')
    raise UserError(f'{path} holds token shards ({kinds["tokens"]}) and text ({other}); give each its own folder.')
  if 'tokens' in kinds and data.tokenizer == 'bpe':
    raise UserError(f'{path} holds token shards, so data.tokenizer must be the file of the tokenizer that made them, '
                    f"not 'bpe'.")
  splits = found.splits_of(name for name, _, _ in files)
  cut = splits is None and kinds.keys() <= {'text', 'tokens'} and (
      len(files) * data.validation_fraction < FEW_DOCUMENTS)
  slices, unused = [], []
  for name, file, kind in files:
    if splits and not splits[name]:
      unused.append(name)
    elif cut and not readers.compression_of(file):
      slices.extend(_with_tail(name, file, kind, data.validation_fraction))
    else:
      slices.extend(((splits or {}).get(name, ''), s) for s in DIVIDE[kind](name, file, data.text_field))
  rule = 'named splits' if splits else f'last {data.validation_fraction} of each file' if cut else ''
  return Found(path.name.split('.')[0] or 'data', tuple(slices), tuple((n, f) for n, f, _ in files), rule,
               (*ignored, *unused))


def _files(path: pathlib.Path) -> tuple[list[tuple[str, pathlib.Path, str]], list[str]]:
  """((name, path, kind) sorted by name, names of other files). A file named by the user is text if unknown."""
  if path.is_file():
    return [(path.name, path, _kind(path) or 'text')], []
  files, ignored = [], []
  for file in sorted(path.rglob('*'), key=lambda f: f.relative_to(path).as_posix()):
    name = file.relative_to(path).as_posix()
    if not file.is_file():
      continue
    if not any(p.startswith('.') for p in file.relative_to(path).parts) and _kind(file):
      files.append((name, file, _kind(file)))
    else:
      ignored.append(name)
  return files, ignored


def _kind(path: pathlib.Path) -> str | None:
  compressed = readers.compression_of(path)
  kind = KINDS.get((path.with_suffix('') if compressed else path).suffix.lower())
  return None if compressed and kind in ('tokens', 'parquet') else kind


def _with_tail(name, path, kind, fraction: float) -> list[tuple[str, Slice]]:
  """A file as a train and a validation slice: so few files cannot be drawn by hash."""
  if kind == 'tokens':
    length = len(readers.open_ids(path))
    cut, width = length - max(int(length * fraction), 2), path.stat().st_size / max(length, 1)
  else:
    length, width = path.stat().st_size, 1
    cut = _line_after(path, int(length * (1 - fraction)))
  if not 0 < cut < length:
    return [('train', Slice(kind, str(path), name, size=path.stat().st_size))]
  return [('train', Slice(kind, str(path), name, 0, cut, int(cut * width))),
          ('validation', Slice(kind, str(path), name, cut, length, int((length - cut) * width)))]


def _line_after(path: pathlib.Path, offset: int) -> int:
  """First start of a line at or after `offset`; without one nearby, of a word, else of a character."""
  with open(path, 'rb') as file:
    file.seek(offset)
    block = file.read(1 << 16)
  for separator in (b'\n', b' '):
    at = block.find(separator)
    if 0 <= at < len(block) - 1:
      return offset + at + 1
  starts = (i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80)
  return offset + next(starts, 0)


def _whole(name, path, text_field) -> list[Slice]:
  return [Slice(_kind(path) or 'text', str(path), name, size=path.stat().st_size)]


def _line_ranges(name, path, text_field) -> list[Slice]:
  """JSON lines that are not compressed can be read from any place on."""
  size = path.stat().st_size
  if readers.compression_of(path) or size <= found.PART_BYTES:
    return _whole(name, path, text_field)
  starts = range(0, size, found.PART_BYTES)
  return [Slice('jsonl', str(path), name, s, min(s + found.PART_BYTES, size), min(found.PART_BYTES, size - s))
          for s in starts]


def _row_groups(name, path, text_field) -> list[Slice]:
  import pyarrow
  import pyarrow.parquet
  try:
    metadata = pyarrow.parquet.read_metadata(path)
  except (OSError, pyarrow.ArrowException) as error:
    raise readers.damaged(path, 'in its footer', error) from None
  columns = metadata.schema.to_arrow_schema().names
  if text_field not in columns:
    raise UserError(f'{path} has no field {text_field!r}.{nearest(text_field, columns)}')
  return [Slice('parquet', str(path), name, g, g + 1, metadata.row_group(g).total_byte_size)
          for g in range(metadata.num_row_groups)]


DIVIDE = {'text': _whole, 'tokens': _whole, 'jsonl': _line_ranges, 'parquet': _row_groups}
