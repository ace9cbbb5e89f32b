"""Batches from a folder of prepared rows of text."""

import functools
import pathlib
from collections.abc import Iterator

from lns_jax.data import order, packing, rows, tokenizers
from lns_jax.data.order import Batch
from lns_jax.data.prepare import prepare

__all__ = ('Batch', 'Dataset', 'open', 'prepare')


class _Rows:
  """Random access to the decoded rows of one split; what Grain calls a data source."""

  def __init__(self, source, T: int):
    self._source, self._T = source, T

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index) -> Batch:
    return packing.decode_row(self._source[index], self._T)


class Dataset(order.Rows):
  """A prepared folder, opened.

  Rows are {'tokens', 'targets', 'segment_ids'}: int32 [T]; segment 0 is padding and has no part in the loss.

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
    super().__init__(str(folder), {
        s: _Rows(builder.as_data_source(s), self.seq_len) for s in self.info['splits']})

  def eval_batches(self, split: str, batch_size: int, **kwargs) -> Iterator[Batch]:
    """As of `order.Rows`, with 'bytes' [B, T]: how many bytes of text each target stands for."""
    batches = super().eval_batches(split, batch_size, **kwargs)
    return (b | {'bytes': self.tokenizer.token_bytes[b['targets']]} for b in batches)

  @functools.cache  # every evaluation of a run asks for the same
  def rows_within(self, split: str, max_tokens: int) -> int:
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
