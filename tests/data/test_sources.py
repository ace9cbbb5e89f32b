"""What users have (folders, compressed files, Parquet, TFDS sets, token shards) becomes the right splits."""

import gzip
import json
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

from lns_jax.config import DataConfig
from lns_jax.data import found, pipeline, sources, tokenizers
from lns_jax.errors import UserError

TEXTS = [f'text {i} of many' for i in range(40)]


def config(source, tmp_path, **settings):
  values = {'tokenizer': 'byte', 'seq_len': 32, 'validation_fraction': 0.2, **settings}
  return DataConfig(source=str(source), cache_dir=str(tmp_path / 'cache'), **values)


def built(*args, **settings):
  return pipeline.open(pipeline.prepare(config(*args, **settings), 0, progress=False))


def stream(dataset, split):
  """All targets of a split as text, EOS as |."""
  rows = [dataset.row(split, i) for i in range(dataset.num_rows(split))]
  ids = np.concatenate([r['targets'][r['segment_ids'] > 0] for r in rows])
  return ''.join('|' if i == 257 else chr(i) for i in ids)


def lines(texts):
  return ''.join(json.dumps({'text': t}) + '\n' for t in texts)


def test_c4_shards_by_their_names(tmp_path):
  folder = tmp_path / 'c4' / 'en'
  folder.mkdir(parents=True)
  for i in (0, 1):
    (folder / f'c4-train.{i:05d}-of-01024.json.gz').write_bytes(gzip.compress(lines(TEXTS[i::2]).encode()))
  (folder / 'c4-validation.00000-of-00008.json.gz').write_bytes(gzip.compress(lines(['held out']).encode()))
  (folder / 'README').write_text('no data')
  dataset = built(folder, tmp_path)
  assert stream(dataset, 'train') == '|'.join(TEXTS[0::2] + TEXTS[1::2]) + '|'
  assert stream(dataset, 'validation') == 'held out|'
  assert dataset.info['ignored_files'] == ['README']


def test_the_same_documents_in_any_format_are_the_same_rows(tmp_path):
  made = []
  for kind in ('jsonl', 'json.gz', 'parquet'):
    (tmp_path / kind).mkdir()
    for split, texts in (('train', TEXTS), ('valid', ['held out'])):
      path = tmp_path / kind / f'{split}.{kind}'
      if kind == 'parquet':
        pyarrow.parquet.write_table(pyarrow.table({'text': texts}), path, row_group_size=7)
      else:
        path.write_bytes(gzip.compress(lines(texts).encode()) if kind == 'json.gz' else lines(texts).encode())
    made.append(built(tmp_path / kind, tmp_path))
  assert stream(made[0], 'train') == '|'.join(TEXTS) + '|'
  for split in ('train', 'validation'):
    assert len({stream(d, split) for d in made}) == 1


def test_a_folder_of_text_files_keeps_test_files_out_and_says_so(tmp_path):
  for name, text in (('train/b.txt', 'bb'), ('train/a.md', 'aa'), ('val/c.txt', 'cc'), ('test/d.txt', 'dd'),
                     ('.hidden/e.txt', 'ee')):
    (tmp_path / 'src' / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / 'src' / name).write_text(text)
  dataset = built(tmp_path / 'src', tmp_path)
  assert stream(dataset, 'train') == 'aa|bb|' and stream(dataset, 'validation') == 'cc|'
  assert dataset.info['ignored_files'] == ['.hidden/e.txt', 'test/d.txt']


def test_names_say_the_split_only_as_whole_words():
  for name, split in (('c4-train.00000-of-01024', 'train'), ('en/c4-validation.0', 'validation'), ('val', 'validation'),
                      ('valid_1', 'validation'), ('data/test/a', 'test'), ('trains', ''), ('value', ''),
                      ('medieval', ''), ('train/validation', 'validation'), ('contest', '')):
    assert found.split_named(name) == split, name


def test_one_text_file_is_cut_into_train_and_validation_at_a_line(tmp_path):
  text = '\n'.join(f'line {i} of a play' for i in range(100))
  (tmp_path / 'play.txt').write_text(text)
  dataset = built(tmp_path / 'play.txt', tmp_path, validation_fraction=0.1)
  train, validation = stream(dataset, 'train')[:-1], stream(dataset, 'validation')[:-1]
  assert train + validation == text and validation.startswith('line ') and len(validation) < 0.11 * len(text)


def test_one_text_without_line_or_space_is_cut_between_characters(tmp_path):
  (tmp_path / 'a.txt').write_text('東' * 1000)
  dataset = built(tmp_path / 'a.txt', tmp_path)
  assert dataset.info['dropped']['non_utf8'] == 0
  assert sum(s['bytes'] for s in dataset.info['splits'].values()) == 3000


def test_many_text_files_are_drawn_by_hash(tmp_path):
  (tmp_path / 'src').mkdir()
  for i in range(60):
    (tmp_path / 'src' / f'{i}.txt').write_text(f'file {i}')
  dataset = built(tmp_path / 'src', tmp_path)
  parts = [stream(dataset, s).split('|')[:-1] for s in ('train', 'validation')]
  assert sorted(sum(parts, [])) == sorted(f'file {i}' for i in range(60)) and 3 < len(parts[1]) < 30


@pytest.fixture(scope='module')
def c4(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tfds')
  texts = {'train': TEXTS, 'validation': ['held out', 'too']}
  writer = pathlib.Path(__file__).parent / 'c4_like.py'
  subprocess.run([sys.executable, str(writer), str(folder), json.dumps(texts)], check=True, capture_output=True)
  return folder


def test_c4_in_the_layout_of_tfds(c4, tmp_path):
  assert (c4 / 'c4' / 'en' / '3.1.0' / 'features.json').exists()
  dataset = built('tfds:c4/en', tmp_path, data_dir=str(c4))
  assert stream(dataset, 'train') == '|'.join(TEXTS) + '|'
  assert stream(dataset, 'validation') == 'held out|too|'
  again = built(c4 / 'c4' / 'en' / '3.1.0', tmp_path)  # the folder itself
  assert again.hash == dataset.hash
  versioned = built('tfds:c4/en:3.1.0', tmp_path, data_dir=str(c4))
  assert versioned.hash == dataset.hash


def test_a_tfds_set_in_tfrecord_files_is_read_without_tensorflow(c4, tmp_path):
  old, new = c4 / 'c4' / 'en' / '3.1.0', tmp_path / 'c4' / 'en' / '3.1.0'
  new.mkdir(parents=True)
  builder = tfds.builder_from_directory(old)
  for split in ('train', 'validation'):
    with open(new / f'c4-{split}.tfrecord-00000-of-00001', 'wb') as file:
      for raw in builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES):
        file.write(struct.pack('<QI', len(raw), 0) + raw + bytes(4))
  (new / 'features.json').write_text((old / 'features.json').read_text())
  info = (old / 'dataset_info.json').read_text().replace('"array_record"', '"tfrecord"')
  (new / 'dataset_info.json').write_text(info)
  dataset = built('tfds:c4/en', tmp_path, data_dir=str(tmp_path))
  assert stream(dataset, 'train') == '|'.join(TEXTS) + '|' and stream(dataset, 'validation') == 'held out|too|'
  whole = (new / 'c4-train.tfrecord-00000-of-00001').read_bytes()
  (new / 'c4-train.tfrecord-00000-of-00001').write_bytes(whole[:-30])
  with pytest.raises(UserError, match=r'c4-train\.tfrecord-00000-of-00001 is damaged in record 39'):
    built('tfds:c4/en', tmp_path, data_dir=str(tmp_path))


def test_token_shards_are_taken_as_they_are(tmp_path):
  (tmp_path / 'ids').mkdir()
  ids = sum(([256, *t.encode(), 257] if i % 2 else [*t.encode(), 257] for i, t in enumerate(TEXTS)), [])
  np.array(ids, np.uint16).tofile(tmp_path / 'ids' / 'train.bin')
  np.save(tmp_path / 'ids' / 'val.npy', np.array([*b'held out', 257]))
  dataset = built(tmp_path / 'ids', tmp_path)
  assert stream(dataset, 'train') == '|'.join(TEXTS) + '|' and stream(dataset, 'validation') == 'held out|'
  starts = sum(int((dataset.row('train', i)['tokens'] == 256).sum()) for i in range(dataset.num_rows()))
  assert starts == len(TEXTS)  # known fault S3: a shard's own BOS is not doubled
  assert dataset.info['splits']['train']['bytes'] == sum(map(len, TEXTS))


def test_token_ids_beyond_the_tokenizer_are_refused(tmp_path):
  np.save(tmp_path / 'a.npy', np.array([5, 300, 257] * 50))
  with pytest.raises(UserError, match=r'a\.npy:0 holds the token id 300 but tokenizer byte has 258 tokens'):
    built(tmp_path / 'a.npy', tmp_path)


@pytest.mark.parametrize('case, words', [
    ('nowhere', ["'nowhere' does not exist", 'embedded', 'tfds:NAME']),
    ('embeded', ["'embeded' does not exist", 'embedded']),
    ('empty', ['holds no file that can be read', '.jsonl']),
    ('mixed', ['token shards (b.npy) and text (a.txt)']),
    ('tokens', ['holds token shards', 'data.tokenizer']),
    ('column', ["no field 'text'", "'txt'"]),
    ('tfds:nothing_of_this_name', ["TFDS does not know 'nothing_of_this_name'"]),
    ('tfds:ag_news_subset', ['is not prepared', 'array_record']),
])
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, case, words):
  monkeypatch.chdir(tmp_path)
  for folder in ('empty', 'mixed', 'tokens', 'column'):
    (tmp_path / folder).mkdir()
  np.save(tmp_path / 'mixed' / 'b.npy', np.arange(5))
  (tmp_path / 'mixed' / 'a.txt').write_text('a')
  np.save(tmp_path / 'tokens' / 'b.npy', np.arange(5))
  pyarrow.parquet.write_table(pyarrow.table({'txt': ['a']}), tmp_path / 'column' / 'a.parquet')
  with pytest.raises(UserError) as error:
    sources.resolve(config(case, tmp_path, tokenizer='bpe', data_dir=str(tmp_path)))
  assert all(w in str(error.value) for w in words) and '\n' not in str(error.value), error.value


def test_a_tokenizer_trained_on_a_folder_has_not_seen_the_validation_split(tmp_path):
  (tmp_path / 'src').mkdir()
  (tmp_path / 'src' / 'train.jsonl').write_text(lines(['ab ab ab'] * 50))
  (tmp_path / 'src' / 'val.jsonl').write_text(lines(['xyzw xyzw xyzw'] * 50))
  data = config(tmp_path / 'src', tmp_path, tokenizer='bpe')
  tokenizer = pipeline.open(pipeline.prepare(data, 300, progress=False)).tokenizer
  assert len(tokenizer.encode('ab ab')) == 2 and len(tokenizer.encode('xyzw')) == 4
  assert tokenizer.hash == tokenizers.train_bpe(['ab ab ab'] * 50, 300).hash
