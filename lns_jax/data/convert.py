"""One part of a source into rows: read, split, tokenise, pack, write. Runs in any process, in any order."""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from lns_jax import files
from lns_jax.data import packing, readers, rows, tokenizers
from lns_jax.errors import UserError

SPLITS = ('train', 'validation')
BATCH_CHARS = 1 << 19  # text that is tokenised in one call


@dataclasses.dataclass(frozen=True)
class Job:
  """What all parts have in common; `folder` is where files go and holds the tokenizer."""

  folder: str
  seq_len: int
  packing: str
  add_bos: bool
  options: readers.Options
  validation_fraction: float


def split_of(document_id: str, fraction: float) -> str:
  """The split of a document by the hash of its id: the same on every machine and for any division of work."""
  number = int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8])
  return 'validation' if number < fraction * 2**64 else 'train'


@functools.lru_cache(1)
def _tokenizer(folder: str) -> tokenizers.Tokenizer:
  return tokenizers.load(folder)


@dataclasses.dataclass(frozen=True)
class Piece:
  """Ids of a document or of a stretch of one, without specials; `size` in bytes of text."""

  split: str
  ids: np.ndarray
  size: int
  first: bool
  last: bool


def with_ends(piece: Piece, bos: int | None, eos: int | None) -> np.ndarray:
  """A piece's ids, behind BOS where it starts a document and before EOS where it ends one; None: no such token."""
  ids = piece.ids
  starts = ids.size and ids[0] == bos  # token shards may carry theirs
  if piece.first and bos is not None and not starts:
    ids = np.concatenate([np.array([bos], np.int32), ids])
  if piece.last and eos is not None:
    ids = np.concatenate([ids, np.array([eos], np.int32)])
  return ids


class _Split:
  """One split of one part: completes its documents, packs them, writes its file, counts."""

  def __init__(self, path: pathlib.Path, budget: int, job: Job, tokenizer: tokenizers.Tokenizer):
    self._packer = packing.MAKERS[job.packing](job.seq_len, tokenizer.eos_id)
    self._writer = rows.Writer(path, packing.id_dtype(tokenizer.vocab_size))
    self._bos = tokenizer.bos_id if job.add_bos else None
    self._eos = tokenizer.eos_id
    self._left = budget or math.inf
    self._length = 0  # ids of the open document so far
    self._counts = dict.fromkeys(('documents', 'bytes', 'tokens', 'rows', 'tokens_cut', 'too_short'), 0)

  def add(self, piece: Piece) -> bool:
    """Takes the next piece; False: it is not taken, since it or one before it did not fit the budget."""
    ids = with_ends(piece, self._bos, self._eos)
    # Documents of a part with a budget are short, so that each is one piece.
    size = self._packer.predictions(len(ids))
    if size > self._left:
      self._left = 0
      return False
    self._left -= size
    self._length += len(ids)
    self._counts['bytes'] += piece.size
    self._write(self._packer.add(ids, piece.last))
    if piece.last:
      self._counts['too_short' if self._length < 2 else 'documents'] += 1
      self._length = 0
    return True

  def _write(self, packed: Iterable[packing.Row]) -> None:
    for row in packed:
      self._writer.write(row)
      self._counts['tokens'] += sum(len(piece) - 1 for piece in row)

  def close(self) -> dict[str, int]:
    """Finishes the file and returns the counts."""
    self._write(self._packer.flush())
    self._writer.close()
    return self._counts | {'rows': self._writer.rows, 'tokens_cut': self._packer.cut}


def part_file(folder, index: int, split: str) -> pathlib.Path:
  """Rows of a split of part `index`, before all parts are done."""
  return pathlib.Path(folder) / f'part-{index:05d}-{split}.array_record'


def counts_file(folder, index: int) -> pathlib.Path:
  """Counts of part `index`; written last, so it says that the part is done."""
  return pathlib.Path(folder) / f'part-{index:05d}.json'


def convert(index: int, part: readers.Part, job: Job) -> dict[str, dict[str, int]]:
  """Writes the rows of part `index` and returns its counts, or finds them from a run that was killed.

  Returns:
    {'train': {...}, 'validation': {...}, 'dropped': {...}}; `tokens` are predictions, i.e. loss terms.
  """
  done = counts_file(job.folder, index)
  if done.exists():
    return json.loads(done.read_text())
  tokenizer = _tokenizer(job.folder)
  splits = {s: _Split(part_file(job.folder, index, s), part.budget, job, tokenizer) for s in SPLITS}
  dropped = Counter(empty=0, non_utf8=0, over_budget=0)
  for piece in encoded(part, job.options, job.validation_fraction, tokenizer, dropped):
    dropped['over_budget'] += not splits[piece.split].add(piece)
  counts = {s: to.close() for s, to in splits.items()} | {'dropped': dict(dropped)}
  files.write_json(done, counts)
  return counts


def encoded(part: readers.Part, options: readers.Options, validation_fraction: float, tokenizer: tokenizers.Tokenizer,
            dropped: Counter) -> Iterator[Piece]:
  """The part's documents as ids, tokenised many at a time, long documents in pieces."""
  waiting, size = [], 0
  to_pieces = _id_pieces if part.slices[0].kind == 'tokens' else tokenizer.pieces
  for document in readers.read(part, options, dropped):
    split = part.split or split_of(document.id, validation_fraction)
    empty = True
    for content, first, last in _ends_known(_not_blank(to_pieces(document.chunks))):
      empty = False
      waiting.append((split, content, first, last, document.id))
      size += len(content)
      if size >= BATCH_CHARS:
        yield from _encode(waiting, tokenizer)
        waiting, size = [], 0
    dropped['empty'] += empty
  yield from _encode(waiting, tokenizer)


def _encode(waiting: list, tokenizer) -> Iterator[Piece]:
  """Tokenises what waits, or checks the ids that came as such."""
  contents = [content for _, content, _, _, _ in waiting]
  are_ids = bool(contents) and not isinstance(contents[0], str)
  encoded = contents if are_ids else tokenizer.encode_batch(contents)
  for (split, content, first, last, name), ids in zip(waiting, encoded, strict=True):
    if are_ids:
      wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
      if wrong.size:
        raise UserError(f'{name} holds the token id {wrong[0]} but tokenizer {tokenizer.name} has '
                        f'{tokenizer.vocab_size} tokens; name the tokenizer that made the shards.')
      size = int(tokenizer.token_bytes[ids].sum())
    else:
      size = len(content) if content.isascii() else len(content.encode())
    yield Piece(split, ids.astype(np.int32), size, first, last)


def _id_pieces(chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
  return (chunk for chunk in chunks if chunk.size)


def _not_blank(pieces: Iterable[str | np.ndarray]) -> Iterator[str | np.ndarray]:
  """The pieces of a document, or nothing where all of it is white space."""
  pieces, held = iter(pieces), []
  for piece in pieces:
    held.append(piece)
    if not isinstance(piece, str) or piece.strip():
      yield from held
      yield from pieces


def _ends_known(items: Iterable) -> Iterator[tuple]:
  """(item, is first, is last)."""
  previous, first = None, True
  for item in items:
    if previous is not None:
      yield previous, first, False
      first = False
    previous = item
  if previous is not None:
    yield previous, first, True
