"""Batches from a folder of prepared rows. Their order is a function of (seed, step) and of nothing else."""

import functools
import pathlib
from collections.abc import Iterator

import numpy as np

from lns_jax.config import check_batch
from lns_jax.data import packing, rows, tokenizers
from lns_jax.data.prepare import prepare
from lns_jax.errors import UserError

__all__ = ('Batch', 'Dataset', 'open', 'prepare')

# {'tokens', 'targets', 'segment_ids'}: int32 [rows, T]; segment 0 is padding and has no part in the loss.
Batch = dict[str, np.ndarray]


class _Rows:
  """Random access to the decoded rows of one split; what Grain calls a data source."""

  def __init__(self, source, T: int):
    self._source, self._T = source, T

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index) -> Batch:
    return packing.decode_row(self._source[index], self._T)


class Dataset:
  """A prepared folder, opened.

  Attributes:
    folder: where it lies. info: the content of its data_info.json. hash: identifies the rows: runs with
      different hashes have seen different data. tokenizer: what made the ids. seq_len: T.
  """

  def __init__(self, folder):
    import tensorflow_datasets as tfds
    self.folder = pathlib.Path(folder)
    self.info = rows.read_info(self.folder)
    self.hash: str = self.info['fingerprint']
    self.seq_len: int = self.info['recipe']['seq_len']
    self.tokenizer = tokenizers.load(self.folder)
    builder = tfds.builder_from_directory(self.folder)
    self._rows = {s: _Rows(builder.as_data_source(s), self.seq_len) for s in self.info['splits']}

  def num_rows(self, split: str = 'train') -> int:
    """Number of rows of a split."""
    return len(self._split(split))

  def row(self, split: str, index: int) -> Batch:
    """One row: int32 [T] arrays."""
    return self._split(split)[index]

  def _split(self, split: str) -> _Rows:
    if split not in self._rows:
      raise UserError(f'{self.folder} has no split {split!r}; known: {", ".join(self._rows)}.')
    return self._rows[split]

  def train_batches(self, seed: int, batch_size: int, *, start_step: int = 0, num_steps: int | None = None,
                    process_index: int = 0, process_count: int = 1, read_threads: int = 4) -> Iterator[Batch]:
    """Batches of training rows, shuffled anew in every epoch, without end unless `num_steps` is given.

    Step s of the whole run is rows [s B, (s + 1) B) of the endless shuffled sequence; process p of P gets
    its p-th B / P rows. A batch may join the end of an epoch and the start of the next.

    Args:
      batch_size: B, over all processes. start_step: first step that is wanted. num_steps: how many.

    Raises:
      UserError: at once, if there are fewer rows than B or B does not divide by P.
    """
    check_batch('train.batch_size', batch_size, process_count, 'processes')
    if self.num_rows('train') < batch_size:
      raise UserError(f'{self.folder} has {self.num_rows("train")} training rows but train.batch_size is '
                      f'{batch_size}; prepare more text or use a smaller batch.')
    return self._train_batches(seed, batch_size // process_count, start_step, num_steps,
                               process_index, process_count, read_threads)

  def _train_batches(self, seed, local, start_step, num_steps, p, P, threads) -> Iterator[Batch]:
    import grain
    shuffled = grain.MapDataset.source(self._rows['train']).seed(seed).shuffle().repeat()
    # Without drop_remainder the length of the endless sequence overflows for batches of one row.
    dataset = shuffled.batch(local, drop_remainder=True)[p::P]
    iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads)))
    iterator.set_state({'next_index': start_step})
    step = 0
    while num_steps is None or step < num_steps:
      yield next(iterator)
      step += 1

  def eval_batches(self, split: str, batch_size: int, *, max_tokens: int = 0,
                   process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
    """All rows of a split in order, once. The last batch is filled up with rows of padding.

    Args:
      batch_size: B, over all processes. max_tokens: stop before the row that would exceed it; 0: all.
    """
    check_batch('eval.batch_size', batch_size, process_count, 'processes')
    source = self._split(split)
    count = self._rows_within(split, max_tokens)
    return self._eval_batches(source, count, batch_size, process_index, batch_size // process_count)

  def _eval_batches(self, source, count, batch_size, p, local) -> Iterator[Batch]:
    padding = {name: np.zeros(self.seq_len, np.int32) for name in ('tokens', 'targets', 'segment_ids')}
    for start in range(0, count, batch_size):
      mine = range(start + p * local, start + (p + 1) * local)
      batch = [source[i] if i < count else padding for i in mine]
      yield {name: np.stack([row[name] for row in batch]) for name in padding}

  @functools.cache  # every evaluation of a run asks for the same
  def _rows_within(self, split: str, max_tokens: int) -> int:
    """How many first rows hold at most `max_tokens` predictions (at least one row)."""
    source = self._split(split)
    if not max_tokens:
      return len(source)
    seen, count = 0, 0
    while count < len(source) and seen < max_tokens:
      seen += int((source[count]['segment_ids'] > 0).sum())
      count += 1
    return max(count - (seen > max_tokens), 1)


def open(folder) -> Dataset:
  """Opens a folder that `prepare` made.

  Raises:
    UserError: if it is none.
  """
  return Dataset(folder)
