"""Rows on disk: in TFDS layout, the same bytes from any process, and never fewer than were written."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from lns_jax.data import rows
from lns_jax.errors import UserError

ROWS = [[np.arange(5, dtype=np.int32), np.arange(9, 12, dtype=np.int32)], [np.array([70000, 3], np.int32)]]


def written(folder, dtype=np.dtype(np.uint32)):
  writer = rows.Writer(folder / rows.file_name('train', 0, 1), dtype)
  for row in ROWS:
    writer.write(row)
  writer.close()
  rows.write_metadata(folder, dtype, {'train': [len(ROWS)]})
  return tfds.builder_from_directory(folder)


def test_tfds_reads_the_folder(tmp_path):
  source = written(tmp_path).as_data_source('train')
  assert len(source) == 2
  assert source[0]['ids'].tolist() == [0, 1, 2, 3, 4, 9, 10, 11] and source[0]['lengths'].tolist() == [5, 3]
  assert source[1]['ids'].tolist() == [70000, 3] and source[1]['ids'].dtype == np.uint32


def test_the_fields_of_a_record_are_in_one_order(tmp_path):
  # a map of protobuf is written in an order that differs between processes unless it is asked not to
  raw = written(tmp_path).as_data_source('train', deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
  for i in range(len(raw)):
    record = raw.data_source[i]
    assert record.index(b'ids') < record.index(b'lengths')


def test_no_row_makes_no_file(tmp_path):
  rows.Writer(tmp_path / 'none', np.dtype(np.uint16)).close()
  assert not (tmp_path / 'none').exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
  writer = rows.Writer(tmp_path / 'absent' / 'a.array_record', np.dtype(np.uint16))
  with pytest.raises(UserError, match='a.array_record cannot be written'):
    writer.write(ROWS[0])
