"""The folder of prepared rows: array_record files in TFDS layout beside `data_info.json` and the tokenizer.

Written without TensorFlow: records are serialised by TFDS features, files by array_record, metadata by
`tfds.folder_dataset`. Any TFDS reads it: `tfds.builder_from_directory(folder).as_data_source('train')`.
"""

import json
import os
import pathlib

import numpy as np

from lns_jax.data import packing
from lns_jax.errors import UserError

DATASET = 'lns_rows'
INFO = 'data_info.json'


def features(dtype: np.dtype):
  """TFDS features of a row: ids and piece lengths as raw bytes (28 us to read and decode a row of 256)."""
  import tensorflow_datasets as tfds
  raw = tfds.features.Encoding.BYTES
  return tfds.features.FeaturesDict({
      'ids': tfds.features.Tensor(shape=(None,), dtype=dtype, encoding=raw),
      'lengths': tfds.features.Tensor(shape=(None,), dtype=np.uint32, encoding=raw)})


class Writer:
  """Writes rows to one array_record file; without a row there is no file."""

  def __init__(self, path: pathlib.Path, dtype: np.dtype):
    from tensorflow_datasets.core import example_serializer
    self._path, self._dtype = path, dtype
    self._features = features(dtype)
    self._serializer = example_serializer.ExampleSerializer(self._features.get_serialized_info())
    self._file = None
    self.rows = 0

  def write(self, row: packing.Row) -> None:
    if self._file is None:
      self._file = self._try(lambda: array_record_module().ArrayRecordWriter(str(self._path), 'group_size:1'))
    example = self._serializer.get_tf_example(self._features.encode_example(packing.encode_row(row, self._dtype)))
    record = example.SerializeToString(deterministic=True)  # else the order of fields varies by process
    self._try(lambda: self._file.write(record))
    self.rows += 1

  def close(self) -> None:
    """Makes sure that all rows are on disk."""
    if self._file is None:
      return
    self._try(self._file.close)
    with open(self._path, 'rb') as file:
      os.fsync(file)
    written = self._try(lambda: array_record_module().ArrayRecordReader(str(self._path)).num_records())
    if written != self.rows:
      raise UserError(f'{self._path} holds {written} of {self.rows} rows that were written; is the disk full?')

  def _try(self, call):
    try:
      return call()
    except RuntimeError as error:  # what array_record makes of a full disk and the like
      raise UserError(f'{self._path} cannot be written: {str(error).partition(";")[0]}.') from None


def array_record_module():
  """array_record's Python module, imported where rows are written."""
  from array_record.python import array_record_module as module
  return module


def file_name(split: str, index: int, count: int) -> str:
  """TFDS's name of file `index` of `count`."""
  return f'{DATASET}-{split}.array_record-{index:05d}-of-{count:05d}'


def write_metadata(folder: pathlib.Path, dtype: np.dtype, shard_rows: dict[str, list[int]]) -> None:
  """Makes a folder of array_record files one that TFDS reads. `shard_rows`: rows per file, by split."""
  import tensorflow_datasets as tfds
  splits = []
  for split, lengths in shard_rows.items():
    size = sum((folder / file_name(split, i, len(lengths))).stat().st_size for i in range(len(lengths)))
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name=DATASET, split=split, filetype_suffix='array_record')
    splits.append(tfds.core.SplitInfo(
        name=split, shard_lengths=lengths, num_bytes=size, filename_template=template))
  tfds.folder_dataset.write_metadata(
      data_dir=folder, features=features(dtype), split_infos=splits, version='1.0.0', check_data=False)


def read_info(folder: pathlib.Path) -> dict:
  """The data_info.json of a prepared folder. Raises UserError when there is none or it is damaged."""
  try:
    return json.loads((folder / INFO).read_text())
  except OSError:
    raise UserError(f'{folder} is not a folder of prepared data: it has no {INFO}.') from None
  except ValueError:
    raise UserError(f'{folder / INFO} is damaged; prepare the data again.') from None
