"""A few rows of prepared data or of any text, for a look at a model: nothing is prepared or written.

Neighbouring rows are of one document, and what one file holds may be all a model knows by heart or has never seen: rows
come in a drawn order, so that the first few stand for all.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from lns_jax.config import DataConfig
from lns_jax.data import convert, masking, packing, readers, sources, tokenizers
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
  return _first(data, tokenizer, tokens, _packed)


def encoder_rows(data: DataConfig, tokenizer: tokenizers.Tokenizer, tokens: int, *, hidden: bool,
                 seed: int = 0) -> tuple[list[Batch], str, int]:
  """As `rows`, for an encoder: a row is [CLS], a run of tokens of one document, [SEP].

  Args:
    tokens: positions wanted, both ends included.
    hidden: whether tokens are hidden and to be predicted, see `masking`; by `seed` and the row's number in the source.

  Returns:
    rows: 'tokens' and 'segment_ids', and where tokens are hidden 'targets' and 'weights', [T]. The rest as of `rows`.
  """
  masking.check(tokenizer, data.seq_len, hidden)
  def between_ends(pieces, data, tokenizer):
    plain = (row for piece in pieces for row in masking.rows(piece.ids, data.seq_len, tokenizer))
    return (masking.hide(row, tokenizer, seed=seed, number=i) for i, row in enumerate(plain)) if hidden else plain
  return _first(data, tokenizer, tokens, between_ends)


def _first(data: DataConfig, tokenizer, tokens: int, rows_of) -> tuple[list[Batch], str, int]:
  """The first rows that `rows_of` makes of a source, shuffled, see `rows`."""
  source = sources.resolve(data)
  parts = sorted(source.parts, key=lambda part: part.split != 'validation')
  found, seen, dropped = [], 0, Counter()
  options = readers.Options(data.text_field, tokenizer.eos_id)
  pieces = (p for part in parts for p in convert.encoded(part, options, data.validation_fraction, tokenizer, dropped))
  for row in rows_of(pieces, data, tokenizer):
    seen += size(row)
    if found and seen > tokens:
      break
    found.append(row)
  if not found:
    raise UserError(f"no tokens in {data.source}: {dropped['empty']} empty documents and no other.")
  return [found[i] for i in _shuffled(len(found))], source.hash, dropped['non_utf8']


def _packed(pieces: Iterable[convert.Piece], data: DataConfig, tokenizer) -> Iterator[Batch]:
  packer, dtype = packing.Packer(data.seq_len), packing.id_dtype(tokenizer.vocab_size)
  bos = tokenizer.bos_id if data.add_bos else None
  decoded = lambda full: (packing.decode_row(packing.encode_row(row, dtype), data.seq_len) for row in full)
  for piece in pieces:
    yield from decoded(packer.add(convert.with_ends(piece, bos, tokenizer.eos_id), piece.last))
  yield from decoded(packer.flush())
