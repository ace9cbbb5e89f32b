"""A few rows of prepared data or of any text, for a look at a model: nothing is prepared or written.

Neighbouring rows are of one document, and what one file holds may be all a model knows by heart or has never seen: rows
come in a drawn order, so that the first few stand for all.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from lns_jax.config import DataConfig
from lns_jax.data import convert, packing, readers, sources, tokenizers
from lns_jax.data.order import Batch, Rows
from lns_jax.errors import UserError


def _shuffled(count: int) -> np.ndarray:
  return np.random.default_rng(0).permutation(count)


def size(row: Batch) -> int:
  """Predictions in a row of text; 1 for an image."""
  return int((row['segment_ids'] > 0).sum()) if 'segment_ids' in row else 1


def drawn(dataset: Rows, split: str, tokens: float) -> list[Batch]:
  """Rows of a split in an order that depends on their number alone, until `tokens` predictions or images are full.

  The rows of a smaller sample are the first of a larger one; at least one.
  """
  found, seen = [], 0
  for i in _shuffled(dataset.num_rows(split)):
    row = dataset.row(split, int(i))
    seen += size(row)
    if found and seen > tokens:
      break
    found.append(row)
  return found


def rows(data: DataConfig, tokenizer: tokenizers.Tokenizer, tokens: int) -> tuple[list[Batch], str, int]:
  """The first packed rows of a source, shuffled; held-out documents before others where the source tells them apart.

  Args:
    data: of which source, data_dir, text_field, seq_len and add_bos are read.
    tokens: predictions wanted; the last row is left out where it would exceed them, unless it is the only one.

  Returns:
    rows: 'tokens', 'targets', 'segment_ids', int32 [T]. hash: of the whole source. broken: documents read whose bytes
    are not all UTF-8; U+FFFD stands for those that are not.

  Raises:
    UserError: for a source that cannot be read, or without a token.
  """
  source = sources.resolve(data)
  parts = sorted(source.parts, key=lambda part: part.split != 'validation')
  found, seen, dropped = [], 0, Counter()
  for row in _packed(parts, data, tokenizer, dropped):
    seen += sum(len(piece) - 1 for piece in row)
    if found and seen > tokens:
      break
    found.append(packing.decode_row(packing.encode_row(row, packing.id_dtype(tokenizer.vocab_size)), data.seq_len))
  if not found:
    raise UserError(f"no tokens in {data.source}: {dropped['empty']} empty documents and no other.")
  return [found[i] for i in _shuffled(len(found))], source.hash, dropped['non_utf8']


def _packed(parts: list[readers.Part], data: DataConfig, tokenizer, dropped: Counter) -> Iterator[packing.Row]:
  packer = packing.Packer(data.seq_len)
  bos = tokenizer.bos_id if data.add_bos else None
  options = readers.Options(data.text_field, tokenizer.eos_id)
  for part in parts:
    for piece in convert.encoded(part, options, data.validation_fraction, tokenizer, dropped):
      yield from packer.add(convert.with_ends(piece, bos, tokenizer.eos_id), piece.last)
  yield from packer.flush()
