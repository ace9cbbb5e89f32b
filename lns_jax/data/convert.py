"""One part of a source into rows: read, split, tokenise, pack, write. Runs in any process, in any order."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from lns_jax.data import packing, readers, rows, tokenizers

SPLITS = ('train', 'validation')
BATCH_CHARS = 1 << 20  # text that is tokenised in one call


@dataclasses.dataclass(frozen=True)
class Job:
  """What all parts have in common; `folder` is where files go and holds the tokenizer."""

  folder: str
  seq_len: int
  packing: str
  add_bos: bool
  text_field: str
  validation_fraction: float


def split_of(document_id: str, fraction: float) -> str:
  """The split of a document by the hash of its id: the same on every machine and for any division of work."""
  number = int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8])
  return 'validation' if number < fraction * 2**64 else 'train'


@functools.cache
def _tokenizer(folder: str) -> tokenizers.Tokenizer:
  return tokenizers.load(folder)


class _Split:
  """One split of one part: packs its documents, writes its file, counts."""

  def __init__(self, path: pathlib.Path, job: Job, tokenizer: tokenizers.Tokenizer):
    self._packer = packing.MAKERS[job.packing](job.seq_len, tokenizer.eos_id)
    self._writer = rows.Writer(path, packing.id_dtype(tokenizer.vocab_size))
    self._ids = 0
    self.counts = Counter(documents=0, bytes=0, tokens=0, rows=0, tokens_cut=0, too_short=0)

  def add(self, ids: np.ndarray, end: bool) -> None:
    self._ids += len(ids)
    self._write(self._packer.add(ids, end))
    if end:
      self.counts['too_short' if self._ids < 2 else 'documents'] += 1
      self._ids = 0

  def _write(self, packed: Iterable[packing.Row]) -> None:
    for row in packed:
      self._writer.write(row)
      self.counts['tokens'] += sum(len(piece) - 1 for piece in row)

  def close(self) -> None:
    self._write(self._packer.flush())
    self._writer.close()
    self.counts.update(rows=self._writer.rows, tokens_cut=self._packer.cut)


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
  splits = {s: _Split(part_file(job.folder, index, s), job, tokenizer) for s in SPLITS}
  dropped = Counter(empty=0, non_utf8=0, over_budget=0)
  for split, ids, size, first, last in _encoded(part, job, tokenizer, dropped):
    to = splits[split]
    if first and tokenizer.bos_id is not None and job.add_bos:
      ids = np.concatenate([[tokenizer.bos_id], ids])
    if last and tokenizer.eos_id is not None:
      ids = np.concatenate([ids, [tokenizer.eos_id]])
    # Documents of a part with a budget are short, so each is one piece.
    if part.budget and (dropped['over_budget'] or to.counts['tokens_seen'] + len(ids) - 1 > part.budget):
      dropped['over_budget'] += 1
      continue
    to.counts['tokens_seen'] += len(ids) - 1
    to.counts['bytes'] += size
    to.add(ids.astype(np.int32), last)
  for to in splits.values():
    to.close()
    del to.counts['tokens_seen']
  counts = {s: dict(to.counts) for s, to in splits.items()} | {'dropped': dict(dropped)}
  rows.write_json(done, counts)
  return counts


Piece = tuple[str, np.ndarray, int, bool, bool]  # split, ids, bytes, first of its document, last of it


def _encoded(part, job, tokenizer, dropped: Counter) -> Iterator[Piece]:
  """The part's documents as ids, tokenised many at a time, long documents in pieces."""
  waiting, chars = [], 0
  for document in readers.read(part, job.text_field, tokenizer.eos_id, dropped):
    split = part.split or split_of(document.id, job.validation_fraction)
    empty = True
    for text, first, last in _with_ends(_not_blank(tokenizer.pieces(document.chunks))):
      empty = False
      waiting.append((split, text, first, last))
      chars += len(text)
      if chars >= BATCH_CHARS:
        yield from _encode(waiting, tokenizer)
        waiting, chars = [], 0
    dropped['empty'] += empty
  yield from _encode(waiting, tokenizer)


def _encode(waiting: list, tokenizer) -> Iterator[Piece]:
  encoded = tokenizer.encode_batch([text for _, text, _, _ in waiting])
  for (split, text, first, last), ids in zip(waiting, encoded, strict=True):
    yield split, ids, len(text) if text.isascii() else len(text.encode()), first, last


def _not_blank(pieces: Iterable[str]) -> Iterator[str]:
  """The pieces of a document, or nothing where all of it is white space."""
  held = []
  for piece in pieces:
    held.append(piece)
    if not piece.isspace() and piece:
      yield from held
      held = []
      break
  else:
    return
  yield from pieces


def _with_ends(items: Iterable) -> Iterator[tuple]:
  """(item, is first, is last)."""
  previous, first = None, True
  for item in items:
    if previous is not None:
      yield previous, first, False
      first = False
    previous = item
  if previous is not None:
    yield previous, first, True
