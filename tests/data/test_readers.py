"""Every kind of file gives the same documents; damage is one sentence with file and place."""

import bz2
import gzip
import json
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lns_jax.data import readers
from lns_jax.data.readers import Options, Part, Slice
from lns_jax.errors import UserError

TEXTS = ['one', 'zwei drei\nvier', '東京 🙂', 'five ' * 50]


def lines(texts=TEXTS):
  return b''.join(json.dumps({'text': t}).encode() + b'\n' for t in texts)


def zst(raw):
  sink = pyarrow.BufferOutputStream()
  with pyarrow.CompressedOutputStream(sink, 'zstd') as stream:
    stream.write(raw)
  return sink.getvalue().to_pybytes()


COMPRESS = {'': bytes, '.gz': gzip.compress, '.bz2': bz2.compress, '.zst': zst}


def read(kind, path, *, start=0, stop=0, **options):
  """(id, text) of all documents, and the counts."""
  counts = Counter()
  part = Part((Slice(kind, str(path), 'name', start, stop),))
  documents = [(d.id, ''.join(d.chunks)) for d in readers.read(part, Options(**options), counts)]
  return documents, counts


@pytest.mark.parametrize('suffix', COMPRESS)
def test_json_lines(tmp_path, suffix):
  path = tmp_path / f'a.jsonl{suffix}'
  path.write_bytes(COMPRESS[suffix](lines() + b'\n  \n'))  # blank lines are no records
  assert [t for _, t in read('jsonl', path)[0]] == TEXTS


@pytest.mark.parametrize('suffix', COMPRESS)
def test_a_text_file_is_one_document(tmp_path, suffix):
  path = tmp_path / f'a.txt{suffix}'
  path.write_bytes(COMPRESS[suffix](b'\xef\xbb\xbf' + TEXTS[2].encode() * 1000))
  assert read('text', path)[0] == [('name', TEXTS[2] * 1000)]


def test_two_gzip_members_in_a_file_are_both_read(tmp_path):
  path = tmp_path / 'a.json.gz'
  path.write_bytes(gzip.compress(lines(TEXTS[:2])) + gzip.compress(lines(TEXTS[2:])))
  assert [t for _, t in read('jsonl', path)[0]] == TEXTS


@pytest.mark.parametrize('column', [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_parquet(tmp_path, column):
  table = pyarrow.table({'n': [1, 2, 3, 4, 5], 'text': pyarrow.array([*TEXTS, None], column)})
  pyarrow.parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=2)
  documents, _ = read('parquet', tmp_path / 'a.parquet', stop=3)
  assert documents == [(f'name:{i}', t) for i, t in enumerate([*TEXTS, ''])]
  assert read('parquet', tmp_path / 'a.parquet', start=1, stop=2)[0] == documents[2:4]


def test_ranges_of_a_json_lines_file_hold_each_line_once_under_the_same_id(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(lines(TEXTS * 5).rstrip(b'\n'))
  size = path.stat().st_size
  whole = read('jsonl', path)[0]
  for step in (1, 7, 20, 100):
    ranges = [read('jsonl', path, start=s, stop=min(s + step, size))[0] for s in range(0, size, step)]
    assert sum(ranges, []) == whole


def test_broken_utf8_is_replaced_and_counted_once_a_document(tmp_path):
  (tmp_path / 'a.txt').write_bytes(b'caf\xe9 \xff ok')
  documents, counts = read('text', tmp_path / 'a.txt')
  assert documents[0][1] == 'caf\ufffd \ufffd ok' and counts['non_utf8'] == 1
  (tmp_path / 'a.jsonl').write_bytes(b'{"text": "caf\xe9"}\n{"text": "ok"}\n{"text": "\\ud800"}\n')
  documents, counts = read('jsonl', tmp_path / 'a.jsonl')
  assert documents[0][1] == 'caf\ufffd' and documents[1][1] == 'ok' and counts['non_utf8'] == 2


def test_a_broken_byte_after_half_a_character_loses_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(readers, 'CHUNK_BYTES', 4)
  (tmp_path / 'a.txt').write_bytes('abc東'.encode() + b'\xff' + '東z'.encode())
  documents, counts = read('text', tmp_path / 'a.txt')
  assert documents[0][1] == 'abc東\ufffd東z' and counts['non_utf8'] == 1


def test_a_character_across_two_blocks_is_not_broken(tmp_path, monkeypatch):
  monkeypatch.setattr(readers, 'CHUNK_BYTES', 5)
  (tmp_path / 'a.txt').write_text('東京 🙂' * 9)
  documents, counts = read('text', tmp_path / 'a.txt')
  assert documents[0][1] == '東京 🙂' * 9 and not counts['non_utf8']


@pytest.mark.parametrize('bad, words', [
    (b'{"text": "a"\n', ['line 3', 'not a JSON object']),
    (b'[1, 2]\n', ['line 3', 'list']),
    (b'{"txt": "a"}\n', ['line 3', "no field 'text'", "'txt'"]),
    (b'{"text": 5}\n', ['line 3', "'text' is not text but int"]),
])
def test_a_bad_line_is_named(tmp_path, bad, words):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(lines(['x', 'y']) + bad + lines(['z']))
  for start in (0, 5):  # also from the middle of the file, where line numbers must be counted
    with pytest.raises(UserError) as error:
      read('jsonl', path, start=start, stop=path.stat().st_size)
    assert all(w in str(error.value) for w in ['a.jsonl', *words]), error.value


@pytest.mark.parametrize('suffix', ['.gz', '.zst', '.bz2'])
def test_a_truncated_file_is_an_error_and_not_a_short_file(tmp_path, suffix):
  path = tmp_path / f'a.jsonl{suffix}'
  raw = COMPRESS[suffix](lines([str(i) for i in range(20000)]))
  for damaged in (raw[:len(raw) // 2], raw[:-3], b'not compressed at all, ' * 9):
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=rf'a\.jsonl\{suffix} is damaged in line \d+: '):
      read('jsonl', path)


def test_a_damaged_parquet_file_is_named(tmp_path):
  path = tmp_path / 'a.parquet'
  pyarrow.parquet.write_table(pyarrow.table({'text': [str(i) for i in range(5000)]}), path)
  raw = bytearray(path.read_bytes())
  raw[4:600] = bytes(596)
  path.write_bytes(raw)
  with pytest.raises(UserError, match=r'a\.parquet is damaged near row 0: '):
    read('parquet', path, stop=1)


def ids_of(path, kind='tokens', eos=None, **place):
  part = Part((Slice(kind, str(path), 'name', **place),))
  return [np.concatenate([*d.chunks, []]).astype(int).tolist()
          for d in readers.read(part, Options(eos_id=eos), Counter())]


def test_token_shards_end_documents_at_eos(tmp_path, monkeypatch):
  monkeypatch.setattr(readers, 'CHUNK_IDS', 3)
  ids = [5, 6, 1, 7, 8, 9, 10, 11, 1, 1, 12]
  np.save(tmp_path / 'a.npy', np.array(ids, np.int64))
  np.array(ids, np.uint16).tofile(tmp_path / 'a.bin')
  for name in ('a.npy', 'a.bin'):
    assert ids_of(tmp_path / name, eos=1) == [[5, 6], [7, 8, 9, 10, 11], [], [12]]
    assert ids_of(tmp_path / name) == [ids]
    assert ids_of(tmp_path / name, start=3, stop=6) == [[7, 8, 9]]


def test_what_is_no_token_shard_is_refused(tmp_path):
  np.save(tmp_path / 'float.npy', np.zeros(3))
  np.save(tmp_path / 'square.npy', np.zeros((3, 3), int))
  (tmp_path / 'text.npy').write_text('hello')
  for name in ('float.npy', 'square.npy', 'text.npy'):
    with pytest.raises(UserError, match=name):
      readers.open_ids(tmp_path / name)
