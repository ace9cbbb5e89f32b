"""Rows hold every prediction of every document once, and documents do not share segments."""

import numpy as np
import pytest

from lns_jax.data import packing


def packed(documents, T, maker=packing.Packer, part=None, eos=None):
  """Rows of documents, each given whole or in parts of `part` ids."""
  packer, rows = maker(T, eos), []
  for ids in documents:
    ids = np.asarray(ids, np.int32)
    cuts = range(0, len(ids), part or len(ids))
    for at in cuts:
      rows += packer.add(ids[at:at + (part or len(ids))], at == cuts[-1])
  return rows + list(packer.flush()), packer


def decoded(row, T):
  return packing.decode_row(packing.encode_row(row, np.dtype(np.uint16)), T)


def test_a_long_document_is_cut_into_windows_that_miss_and_double_nothing():
  # known fault T3: 1000 tokens and EOS without BOS, T = 256
  rows, _ = packed([np.arange(1001)], 256)
  batch = [decoded(r, 256) for r in rows]
  assert [int((b['segment_ids'] > 0).sum()) for b in batch] == [256, 256, 256, 232]
  targets = np.concatenate([b['targets'][b['segment_ids'] > 0] for b in batch])
  np.testing.assert_array_equal(targets, np.arange(1, 1001))
  for b in batch:
    real = b['segment_ids'] > 0
    np.testing.assert_array_equal(b['targets'][real], b['tokens'][real] + 1)


def test_a_row_of_two_documents_by_hand():
  # known fault T1: A = [5, 6, 7], B = [8, 9], here with EOS 1 so that each token of A and B is an input
  rows, _ = packed([[5, 6, 7, 1], [8, 9, 1]], 6)
  row = decoded(rows[0], 6)
  assert row['tokens'].tolist() == [5, 6, 7, 8, 9, 0]
  assert row['targets'].tolist() == [6, 7, 1, 9, 1, 0]
  assert row['segment_ids'].tolist() == [1, 1, 1, 2, 2, 0]
  assert {v.dtype for v in row.values()} == {np.dtype(np.int32)}


def test_a_document_that_crosses_the_border_repeats_one_id_and_starts_a_segment():
  rows, _ = packed([[5, 6, 1], [7, 8, 9, 1]], 4)
  assert [[p.tolist() for p in row] for row in rows] == [[[5, 6, 1], [7, 8, 9]], [[9, 1]]]


def test_short_texts_fill_the_rows():
  # known fault T3: 100 texts of 10 tokens; one padded row each would fill 4 %
  rows, _ = packed([np.arange(11)] * 100, 256)
  assert sum(len(p) - 1 for r in rows for p in r) / (len(rows) * 256) >= 0.95


@pytest.mark.parametrize('seed', range(5))
def test_rows_do_not_depend_on_the_parts_in_which_documents_come(seed):
  rng = np.random.default_rng(seed)
  documents = [rng.integers(0, 999, rng.integers(1, 70)) for _ in range(40)]
  whole, _ = packed(documents, 16)
  for part in (1, 3, 16, 17):
    rows, _ = packed(documents, 16, part=part)
    assert len(rows) == len(whole)
    for a, b in zip(rows, whole, strict=True):
      assert [p.tolist() for p in a] == [p.tolist() for p in b]


@pytest.mark.parametrize('seed', range(5))
def test_every_prediction_is_made_once_and_in_order(seed):
  rng = np.random.default_rng(seed)
  documents = [rng.integers(0, 999, rng.integers(1, 70)) for _ in range(40)]
  rows, _ = packed(documents, 16)
  pairs = [(int(a), int(b)) for row in rows for p in row for a, b in zip(p[:-1], p[1:], strict=True)]
  assert pairs == [(int(a), int(b)) for d in documents for a, b in zip(d[:-1], d[1:], strict=True)]
  filled = [sum(len(p) - 1 for p in row) for row in rows]
  assert all(f == 16 for f in filled[:-1]) and 0 < filled[-1] <= 16


def test_paper_rows_end_in_eos_where_they_are_cut_and_count_what_is_lost():
  documents = [[5, 6, 1], [7, 8, 9, 10, 11, 1], [12, 13, 14, 1]]
  rows, packer = packed(documents, 4, packing.OneDocumentARow, eos=1)
  assert [[p.tolist() for p in r] for r in rows] == [[[5, 6, 1]], [[7, 8, 9, 1]], [[12, 13, 14, 1]]]
  assert packer.cut == 2
  row = decoded(rows[0], 4)
  assert row['tokens'].tolist() == [5, 6, 0, 0] and row['segment_ids'].tolist() == [1, 1, 0, 0]
  in_parts, _ = packed(documents, 4, packing.OneDocumentARow, part=1, eos=1)
  assert [r[0].tolist() for r in in_parts] == [r[0].tolist() for r in rows]


def test_records_keep_ids_in_two_bytes_only_where_they_fit():
  assert packing.id_dtype(65536) == np.uint16
  assert packing.id_dtype(65537) == np.uint32
  row = [np.array([65536, 3], np.int32)]
  assert packing.decode_row(packing.encode_row(row, packing.id_dtype(65537)), 2)['tokens'][0] == 65536


@pytest.mark.parametrize('maker', packing.MAKERS.values())
def test_predictions_of_a_document_are_foretold(maker):
  for n in (1, 2, 4, 5, 9):
    rows, packer = packed([np.arange(n)], 4, maker)
    assert packer.predictions(n) == sum(len(p) - 1 for r in rows for p in r)
