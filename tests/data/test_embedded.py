"""The embedded corpus: the running Python's own text, split by file, enough for validation with any tokenizer."""

import collections

import numpy as np
import pytest

from lns_jax.config import DataConfig
from lns_jax.data import embedded, pipeline
from lns_jax.errors import UserError


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp('cache')


@pytest.fixture(scope='module')
def corpus():
  return embedded.collect()


@pytest.fixture(scope='module')
def dataset(cache):
  data = DataConfig(cache_dir=str(cache), tokenizer='bpe')
  return pipeline.open(pipeline.prepare(data, 2048, progress=False))


def test_it_holds_library_and_topics_without_tests(corpus):
  names = [name for name, _ in corpus.train + corpus.validation]
  assert len(set(names)) == len(names)
  assert {'os.py', 'asyncio/tasks.py', 'topics/with.txt'} <= set(names)
  parts = collections.Counter(part for name in names for part in name.split('/'))
  assert not parts.keys() & {'test', 'tests', 'idle_test', 'site-packages', 'topics.py'}


def test_its_hash_is_its_content(corpus, tmp_path):
  assert embedded.collect().hash == corpus.hash
  for name, text in corpus.train + corpus.validation:
    if not name.startswith('topics/'):
      (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
      (tmp_path / name).write_bytes(text)
  assert embedded.collect(tmp_path).hash == corpus.hash  # the place does not matter
  with open(tmp_path / 'os.py', 'ab') as file:
    file.write(b'#')
  assert embedded.collect(tmp_path).hash != corpus.hash


def test_a_slim_python_still_has_a_corpus_and_an_empty_one_says_so(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'pydoc_data', None)  # its import fails
  for i in range(60):
    (tmp_path / f'm{i}.py').write_bytes(b'x = 1  # caf\xe9\n' * 3000)
  slim = embedded.collect(tmp_path)
  assert len(slim.train) + len(slim.validation) == 60
  (tmp_path / 'empty').mkdir()
  with pytest.raises(UserError, match='too little text'):
    embedded.collect(tmp_path / 'empty')


def test_validation_is_whole_files_of_100k_to_200k_tokens(dataset):
  splits, dropped = dataset.info['splits'], dataset.info['dropped']
  assert 100_000 <= splits['validation']['tokens'] <= 200_000
  reserved = len(embedded.collect().validation)
  empty_there = sum(not text.strip() for _, text in embedded.collect().validation)
  assert splits['validation']['documents'] + dropped['over_budget'] == reserved - empty_there


@pytest.mark.slow
def test_validation_is_100k_to_200k_tokens_of_bytes_too(cache):
  data = DataConfig(cache_dir=str(cache), tokenizer='byte')
  dataset = pipeline.open(pipeline.prepare(data, 258, progress=False))
  assert 100_000 <= dataset.info['splits']['validation']['tokens'] <= 200_000


def test_nothing_of_the_training_text_is_lost(dataset, corpus):
  train = dataset.info['splits']['train']
  assert train['bytes'] == sum(len(text) for _, text in corpus.train if text.strip())
  assert train['documents'] == sum(bool(text.strip()) for _, text in corpus.train)
  rows = [dataset.row('train', i) for i in range(40)]
  ids = np.concatenate([r['targets'][r['segment_ids'] > 0] for r in rows])
  first = next(text for _, text in corpus.train if text.strip()).decode()
  assert dataset.tokenizer.decode(ids)[:2000] == first[:2000]


def test_it_goes_through_tfds(dataset, cache):
  import tensorflow_datasets as tfds
  rows = tfds.builder_from_directory(dataset.folder).as_data_source('train')
  assert len(rows) == dataset.num_rows('train') and rows[0]['ids'].dtype == np.uint16
  text = tfds.builder_from_directory(next(cache.glob('embedded-text-*')) / 'lns_embedded' / '1.0.0')
  assert sorted(text.info.splits) == ['train', 'validation']


def test_a_second_run_finds_it_prepared(dataset, cache):
  stamp = (dataset.folder / 'data_info.json').stat().st_mtime_ns
  assert pipeline.prepare(DataConfig(cache_dir=str(cache)), 2048, progress=False) == dataset.folder
  assert (dataset.folder / 'data_info.json').stat().st_mtime_ns == stamp
