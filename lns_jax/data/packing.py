"""Documents into rows of T predictions, and rows into records and back.

A document is [BOS] + tokens + [EOS]; its n + 1 ids make n predictions (id k predicts id k + 1). A row is a
list of pieces; a piece is a run of n + 1 consecutive ids of one document and fills n positions. Pieces of a
row never see each other (segment ids), and each prediction of a document is in exactly one piece.
"""

from collections.abc import Iterator

import numpy as np

Row = list[np.ndarray]  # pieces, int32 [n_i + 1] with sum(n_i) <= T


class Packer:
  """Packed rows: the stream of all predictions, cut every T.

  Row i holds predictions [i T, (i + 1) T) of the stream. A document that crosses the border goes on in the
  next row as a new segment whose first id is the last one of the row before, so nothing is lost or doubled.
  Only the last row can be part-filled. Documents may be given in parts, so memory is bounded by a part.
  """

  def __init__(self, T: int, eos_id: int | None = None):
    self._T = T
    self._row: list[list[np.ndarray]] = []  # each piece as the parts it came in
    self._filled = 0
    self._open = False  # whether the row's last piece belongs to the document that is being given
    self._tail = np.empty(0, np.int32)  # the last id of the document so far, which the next part continues
    self.cut = 0  # predictions that were given up: none, ever

  def add(self, ids: np.ndarray, end: bool) -> Iterator[Row]:
    """Takes the next ids of a document; `end` closes it. Yields the rows that became full."""
    ids = np.concatenate([self._tail, ids])
    at = 0
    while at < len(ids) - 1:
      n = min(self._T - self._filled, len(ids) - 1 - at)
      if self._open:
        self._row[-1].append(ids[at + 1:at + n + 1])
      else:
        self._row.append([ids[at:at + n + 1]])
      self._open, self._filled, at = True, self._filled + n, at + n
      if self._filled == self._T:
        yield self._take()
    self._open = self._open and not end
    self._tail = ids[:0] if end else ids[-1:]

  def predictions(self, n: int) -> int:
    """How many predictions a document of n ids adds to the rows."""
    return max(n - 1, 0)

  def flush(self) -> Iterator[Row]:
    """Yields the last, part-filled row, if any."""
    if self._row:
      yield self._take()

  def _take(self) -> Row:
    row = [np.concatenate(parts) for parts in self._row]
    self._row, self._filled, self._open = [], 0, False
    return row


class OneDocumentARow:
  """The paper's rows: a document's first T ids, the last of them EOS where it was cut; the rest is given up.

  T ids make T - 1 predictions, as in the authors' code (a T5 tokenizer that truncates and pads to T).
  """

  def __init__(self, T: int, eos_id: int | None = None):
    self._T, self._eos_id = T, eos_id
    self._ids: list[np.ndarray] = []
    self._count = 0
    self.cut = 0

  def add(self, ids: np.ndarray, end: bool) -> Iterator[Row]:
    """Takes the next ids of a document; `end` closes it and yields its row."""
    if self._count < self._T:
      self._ids.append(ids[:self._T - self._count])
    self._count += len(ids)
    if not end:
      return
    row = np.concatenate(self._ids)
    if self._count > self._T:
      self.cut += self._count - self._T
      if self._eos_id is not None:
        row[-1] = self._eos_id
    self._ids, self._count = [], 0
    if len(row) > 1:
      yield [row]

  def predictions(self, n: int) -> int:
    """How many predictions a document of n ids adds to the rows."""
    return max(min(n, self._T) - 1, 0)

  def flush(self) -> Iterator[Row]:
    """Nothing is ever left over."""
    yield from ()


MAKERS = {'packed': Packer, 'paper': OneDocumentARow}  # by config.DataConfig.packing


def id_dtype(vocab_size: int) -> np.dtype:
  """The type in which records keep ids."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def encode_row(row: Row, dtype: np.dtype) -> dict[str, np.ndarray]:
  """A record: the pieces one after another, and their lengths (in ids, so n_i + 1)."""
  return {'ids': np.concatenate(row).astype(dtype), 'lengths': np.array([len(p) for p in row], np.uint32)}


def decode_row(record: dict[str, np.ndarray], T: int) -> dict[str, np.ndarray]:
  """A record as model input.

  Returns:
    {'tokens', 'targets', 'segment_ids'}, each int32 [T]. Segments count from 1; 0 is padding, where tokens
    and targets are 0 too. The weight of a position in the loss is `segment_ids > 0`.
  """
  ids, lengths = record['ids'], record['lengths'].astype(np.int64)
  n = len(ids) - len(lengths)
  out = {name: np.zeros(T, np.int32) for name in ('tokens', 'targets', 'segment_ids')}
  first = np.ones(len(ids) + 1, bool)  # first[i]: a piece starts at i, so id i is nobody's target
  first[1:-1] = False
  first[np.cumsum(lengths)] = True
  out['tokens'][:n] = ids[~first[1:]]
  out['targets'][:n] = ids[~first[:-1]]
  out['segment_ids'][:n] = np.repeat(np.arange(1, len(lengths) + 1), lengths - 1)
  return out

