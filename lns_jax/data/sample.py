"""A few rows of any text, for a look at a model: nothing is prepared or written."""

from collections import Counter
from collections.abc import Iterator

from lns_jax.config import DataConfig
from lns_jax.data import convert, packing, readers, sources, tokenizers
from lns_jax.data.order import Batch
from lns_jax.errors import UserError


def rows(data: DataConfig, tokenizer: tokenizers.Tokenizer, tokens: int) -> tuple[list[Batch], str, int]:
  """The first packed rows of a source, held-out documents before others where the source tells them apart.

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
    size = sum(len(piece) - 1 for piece in row)
    if found and seen + size > tokens:
      break
    found.append(packing.decode_row(packing.encode_row(row, packing.id_dtype(tokenizer.vocab_size)), data.seq_len))
    seen += size
  if not found:
    raise UserError(f"no tokens in {data.source}: {dropped['empty']} empty documents and no other.")
  return found, source.hash, dropped['non_utf8']


def _packed(parts: list[readers.Part], data: DataConfig, tokenizer, dropped: Counter) -> Iterator[packing.Row]:
  packer = packing.Packer(data.seq_len)
  bos = tokenizer.bos_id if data.add_bos else None
  options = readers.Options(data.text_field, tokenizer.eos_id)
  for part in parts:
    for piece in convert.encoded(part, options, data.validation_fraction, tokenizer, dropped):
      yield from packer.add(convert.with_ends(piece, bos, tokenizer.eos_id), piece.last)
  yield from packer.flush()
