"""The order of rows: a function of (seed, step) and of nothing else."""

from collections.abc import Iterator

import numpy as np

from lns_jax.errors import UserError

Batch = dict[str, np.ndarray]


class Rows:
  """Rows of one or more splits, each a dict of arrays, as batches.

  Attributes:
    name: what sentences call it. sources: {split: random access to its rows}.
  """

  def __init__(self, name: str, sources: dict):
    self.name, self.sources = name, sources

  def num_rows(self, split: str = 'train') -> int:
    """Number of rows of a split."""
    return len(self._split(split))

  def row(self, split: str, index: int) -> Batch:
    """One row."""
    return self._split(split)[index]

  def _split(self, split: str):
    if split not in self.sources:
      raise UserError(f'{self.name} has no split {split!r}; known: {", ".join(self.sources)}.')
    return self.sources[split]

  def train_batches(self, seed: int, batch_size: int, *, start_step: int = 0, num_steps: int | None = None,
                    rows=None, read_threads: int = 4) -> Iterator[Batch]:
    """Batches of training rows, shuffled anew in every epoch, without end unless `num_steps` is given.

    Step s of the whole run is rows [s B, (s + 1) B) of the endless shuffled sequence. A batch may join the end of an
    epoch and the start of the next.

    Args:
      batch_size: B, over all processes. start_step: first step that is wanted. num_steps: how many.
      rows: which rows of each batch are wanted, numbers from 0 to B - 1; no other is read. None: all.

    Raises:
      UserError: at once, if there are fewer rows than B.
    """
    if self.num_rows('train') < batch_size:
      raise UserError(f'{self.name} has {self.num_rows("train")} training rows but train.batch_size is '
                      f'{batch_size}; take more data or a smaller batch.')
    rows = range(batch_size) if rows is None else [int(r) for r in rows]
    return self._train_batches(seed, batch_size, start_step, num_steps, rows, read_threads)

  def _train_batches(self, seed, B, start_step, num_steps, rows, threads) -> Iterator[Batch]:
    import grain
    shuffled = grain.MapDataset.source(self.sources['train']).seed(seed).shuffle().repeat()
    wanted = grain.MapDataset.range(len(shuffled) // B * len(rows)).map(
        lambda i: shuffled[i // len(rows) * B + rows[i % len(rows)]])
    # Without drop_remainder the length of the endless sequence overflows for batches of one row.
    dataset = wanted.batch(len(rows), drop_remainder=True)
    iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads)))
    iterator.set_state({'next_index': start_step})
    step = 0
    while num_steps is None or step < num_steps:
      yield next(iterator)
      step += 1

  def eval_batches(self, split: str, batch_size: int, *, max_tokens: int = 0,
                   rows=None) -> Iterator[Batch]:
    """All rows of a split in order, once. The last batch is filled up with rows of padding.

    Args:
      batch_size: B, over all processes. max_tokens: stop before the row that would exceed it; 0: all.
      rows: which rows of each batch are wanted, as of `train_batches`.
    """
    rows = range(batch_size) if rows is None else rows
    return self._eval_batches(self._split(split), self.rows_within(split, max_tokens), batch_size, rows)

  def _eval_batches(self, source, count, batch_size, rows) -> Iterator[Batch]:
    padding = {name: np.zeros_like(value) for name, value in source[0].items()}
    for start in range(0, count, batch_size):
      batch = [source[start + int(r)] if start + r < count else padding for r in rows]
      yield {name: np.stack([row[name] for row in batch]) for name in padding}

  def rows_within(self, split: str, max_tokens: int) -> int:
    """How many first rows of a split are evaluated: all, where rows have no tokens to count."""
    return self.num_rows(split)
