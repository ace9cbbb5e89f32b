"""Prepared rows are found again only when nothing changed, and do not depend on workers or kills."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lns_jax.config import DataConfig
from lns_jax.data import convert, found, pipeline, prepare, rows, tokenizers
from lns_jax.errors import UserError


def config(source, tmp_path, **settings):
  values = {'tokenizer': 'byte', 'seq_len': 32, 'validation_fraction': 0.2, **settings}
  return DataConfig(source=str(source), cache_dir=str(tmp_path / 'cache'), **values)


def built(data, vocab_size=0, **kwargs):
  return pipeline.open(prepare.prepare(data, vocab_size, progress=False, **kwargs))


def write_lines(path, texts):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps({'text': t, 'other': t[::-1]}) + '\n' for t in texts))
  return path


TEXTS = [f'document {i} says {i * i}' for i in range(60)]


def documents(dataset, split):
  """The texts of a split, from its rows: BOS starts a document."""
  ids = []
  for i in range(dataset.num_rows(split)):
    row = dataset.row(split, i)
    real = row['segment_ids'] > 0
    starts = np.flatnonzero(real & (row['tokens'] == dataset.tokenizer.bos_id))
    for at in range(int(real.sum())):
      if at in starts:
        ids.append([])
      ids[-1].append(int(row['targets'][at]))
  return [dataset.tokenizer.decode(d) for d in ids]


def test_every_document_is_in_one_split_with_one_bos_and_one_eos(tmp_path):
  dataset = built(config(write_lines(tmp_path / 'a.jsonl', TEXTS), tmp_path))
  train, validation = documents(dataset, 'train'), documents(dataset, 'validation')
  assert sorted(train + validation) == sorted(TEXTS) and 2 < len(validation) < 30
  splits = dataset.info['splits']
  assert splits['train']['documents'] == len(train) and splits['validation']['documents'] == len(validation)
  assert sum(s['bytes'] for s in splits.values()) == sum(map(len, TEXTS))
  assert sum(s['tokens'] for s in splits.values()) == sum(len(t) + 1 for t in TEXTS)
  every = [dataset.row('train', i) for i in range(dataset.num_rows())]
  assert sum(int((r['tokens'] == 256).sum()) for r in every) == len(train)  # known fault S3: BOS once
  assert sum(int((r['targets'] == 257).sum()) for r in every) == len(train)


def test_empty_documents_are_skipped_and_counted(tmp_path):
  # known fault T5: ['', 'a', ''] gives [a, EOS] and two skipped; white space alone is empty too
  write_lines(tmp_path / 'd' / 'train.jsonl', ['', 'a', '', ' \n'])
  write_lines(tmp_path / 'd' / 'val.jsonl', ['b'])
  dataset = built(config(tmp_path / 'd', tmp_path, add_bos=False))
  assert dataset.info['dropped']['empty'] == 3
  row = dataset.row('train', 0)
  assert row['tokens'][:2].tolist() == [ord('a'), 0] and row['targets'][0] == 257


def test_a_source_without_tokens_is_refused(tmp_path):
  with pytest.raises(UserError, match=r'no tokens in .*a\.jsonl: 2 empty documents'):
    built(config(write_lines(tmp_path / 'a.jsonl', ['', ' ']), tmp_path))
  with pytest.raises(UserError, match='validation split.*validation_fraction = 0.2'):
    built(config(write_lines(tmp_path / 'b.jsonl', ['abc']), tmp_path))


@pytest.mark.parametrize('change', [
    {'seq_len': 16}, {'add_bos': False}, {'packing': 'paper'}, {'validation_fraction': 0.3}, {'text_field': 'other'},
    {'tokenizer': 'bpe'}])
def test_a_changed_setting_makes_another_folder(tmp_path, change):
  # known fault T9
  data = config(write_lines(tmp_path / 'a.jsonl', TEXTS), tmp_path)
  first = prepare.prepare(data, 300, progress=False)
  stamp = (first / rows.INFO).stat().st_mtime_ns
  assert prepare.prepare(data, 300, progress=False) == first
  assert (first / rows.INFO).stat().st_mtime_ns == stamp  # found, not built again
  assert prepare.prepare(dataclasses.replace(data, **change), 300, progress=False) != first
  assert (first / rows.INFO).stat().st_mtime_ns == stamp
  with pytest.raises(UserError, match='prepare into another folder'):
    prepare.prepare(dataclasses.replace(data, **change), 300, out=first, progress=False)


def test_a_tokenizer_of_the_same_size_but_other_content_makes_another_folder(tmp_path):
  data = config(write_lines(tmp_path / 'a.jsonl', TEXTS), tmp_path)
  made = []
  for name, text in (('one', 'abc abd abe'), ('two', 'xyz xyw xyv')):
    tokenizers.train_bpe([text * 9], 262).save(tmp_path / name)
    made.append(built(dataclasses.replace(data, tokenizer=str(tmp_path / name / 'tokenizer.json'))))
  assert made[0].tokenizer.vocab_size == made[1].tokenizer.vocab_size == 262
  assert made[0].folder != made[1].folder and made[0].hash != made[1].hash


def test_one_changed_byte_makes_another_folder(tmp_path):
  path = write_lines(tmp_path / 'a.jsonl', TEXTS)
  os.utime(path, (1e9, 1e9))  # old enough for its hash to be remembered
  first = built(config(path, tmp_path))
  path.write_text(path.read_text().replace('document 5 ', 'document 6 '))
  os.utime(path, (2e9, 2e9))
  second = built(config(path, tmp_path))
  assert first.hash != second.hash and first.info['corpus_hash'] != second.info['corpus_hash']
  path.write_text(path.read_text().replace('document 6 says 25', 'document 5 says 25'))
  os.utime(path, (3e9, 3e9))
  assert built(config(path, tmp_path)).hash == first.hash


def contents(folder):
  return {f.name: f.read_bytes() for f in sorted(folder.iterdir()) if f.name != rows.INFO}


def big_source(tmp_path, parts):
  for i in range(parts):
    write_lines(tmp_path / 'src' / f'{i:02d}.jsonl', [f'part {i} line {j} ' * 10 for j in range(50)])
  return tmp_path / 'src'


def test_rows_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
  monkeypatch.setattr(found, 'PART_BYTES', 20_000)
  monkeypatch.setattr(prepare, 'INLINE_BYTES', 0)
  data = config(big_source(tmp_path, 5), tmp_path)
  one = prepare.prepare(dataclasses.replace(data, workers=1), 0, out=tmp_path / 'one', progress=False)
  two = prepare.prepare(dataclasses.replace(data, workers=2), 0, out=tmp_path / 'two', progress=False)
  assert contents(one) == contents(two)
  assert len([n for n in contents(one) if 'train.array_record' in n]) == 5


RUN = '''
import sys
from lns_jax.config import DataConfig
from lns_jax.data import found, prepare
found.PART_BYTES = 20_000
data = DataConfig(source=sys.argv[1], cache_dir=sys.argv[2], tokenizer='byte', seq_len=32, validation_fraction=0.2)
prepare.prepare(data, 0, out=sys.argv[3], progress=False)
'''


def test_a_killed_run_goes_on_where_it_was(tmp_path):
  source = big_source(tmp_path, 16)
  command = [sys.executable, '-c', RUN, str(source), str(tmp_path / 'cache')]
  process = subprocess.Popen([*command, str(tmp_path / 'out')])
  try:
    deadline = time.time() + 60
    while len(list(tmp_path.glob('out.partial-*/part-*.json'))) < 3 and time.time() < deadline:
      time.sleep(0.002)
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
  done = {f: f.stat().st_mtime_ns for f in tmp_path.glob('out.partial-*/part-*.json')}
  assert 3 <= len(done) < 16, 'the kill came too late'
  assert not (tmp_path / 'out').exists()
  with pytest.raises(UserError, match='not a folder of prepared data'):
    pipeline.open(next(iter(done)).parent)
  kept = {f.name: (f.stat().st_mtime_ns, f.stat().st_ino) for f in next(iter(done)).parent.glob('part-0000[0-2]-*')}
  subprocess.run([*command, str(tmp_path / 'out')], check=True)
  stats = {(f.stat().st_mtime_ns, f.stat().st_ino) for f in (tmp_path / 'out').iterdir()}
  assert set(kept.values()) <= stats  # finished parts were used, not made again
  subprocess.run([*command, str(tmp_path / 'whole')], check=True)
  assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')
  assert not list(tmp_path.glob('out.partial-*'))


def test_two_processes_that_start_together_make_one_folder(tmp_path):
  command = [sys.executable, '-c', RUN, str(big_source(tmp_path, 6)), str(tmp_path / 'cache'), str(tmp_path / 'out')]
  both = [subprocess.Popen(command) for _ in range(2)]
  assert [p.wait() for p in both] == [0, 0]
  assert pipeline.open(tmp_path / 'out').num_rows() > 0
  assert not list(tmp_path.glob('out.partial-*'))


def test_nothing_that_is_in_the_way_is_overwritten(tmp_path):
  data = config(write_lines(tmp_path / 'a.jsonl', TEXTS), tmp_path)
  (tmp_path / 'file').write_text('mine')
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'thesis.txt').write_text('mine')
  for name in ('file', 'full'):
    with pytest.raises(UserError, match='not a folder of prepared data'):
      prepare.prepare(data, 0, out=tmp_path / name, progress=False)
  assert (tmp_path / 'full' / 'thesis.txt').read_text() == (tmp_path / 'file').read_text() == 'mine'
  (tmp_path / 'empty').mkdir()
  assert prepare.prepare(data, 0, out=tmp_path / 'empty', progress=False) == tmp_path / 'empty'


def test_a_prepared_folder_is_a_source_for_runs_with_its_settings(tmp_path):
  data = config(write_lines(tmp_path / 'a.jsonl', TEXTS), tmp_path)
  folder = prepare.prepare(data, 0, out=tmp_path / 'out', progress=False)
  again = dataclasses.replace(data, source=str(folder))
  assert prepare.prepare(again, 258, progress=False) == folder
  for change, words in (({'seq_len': 64}, ['32', '64']), ({'packing': 'paper'}, ['packed', 'paper'])):
    with pytest.raises(UserError) as error:
      prepare.prepare(dataclasses.replace(again, **change), 258, progress=False)
    assert all(w in str(error.value) for w in words)
  with pytest.raises(UserError, match='258 tokens but model.vocab_size is 257'):
    prepare.prepare(again, 257, progress=False)


def test_a_damaged_line_stops_the_work_and_leaves_no_folder(tmp_path):
  path = write_lines(tmp_path / 'a.jsonl', TEXTS)
  path.write_text(path.read_text() + '{"text": \n')
  with pytest.raises(UserError, match=r'a\.jsonl line 61 is not a JSON object'):
    prepare.prepare(config(path, tmp_path), 0, out=tmp_path / 'out', progress=False)
  assert not (tmp_path / 'out').exists()


def test_the_error_of_a_worker_process_is_the_same_sentence(tmp_path, monkeypatch):
  monkeypatch.setattr(found, 'PART_BYTES', 20_000)
  monkeypatch.setattr(prepare, 'INLINE_BYTES', 0)
  source = big_source(tmp_path, 3)
  (source / '01.jsonl').write_text('nothing\n')
  with pytest.raises(UserError, match=r'01\.jsonl line 1 is not a JSON object'):
    built(config(source, tmp_path, workers=2))


LONG = '''
import resource, sys
from lns_jax.config import DataConfig
from lns_jax.data import prepare
kind, source, cache, small = sys.argv[1:]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
data = lambda s: DataConfig(source=s, cache_dir=cache, tokenizer=kind, add_bos=False)
prepare.prepare(data(small), 300, progress=False)
before = peak()
prepare.prepare(data(source), 300, progress=False)
print(peak() - before)
'''


@pytest.mark.parametrize('kind', ['bpe', pytest.param('byte', marks=pytest.mark.slow)])
def test_a_document_of_5_mb_in_one_line_is_handled_in_bounded_memory(tmp_path, kind):
  # known fault T3
  text = 'depth is a curse for the layers ' * 160_000
  write_lines(tmp_path / 'long' / 'train.jsonl', [text])
  write_lines(tmp_path / 'small' / 'train.jsonl', [text[:1 << 20]])
  for name in ('long', 'small'):
    write_lines(tmp_path / name / 'val.jsonl', ['small'])
  run = [sys.executable, '-c', LONG, kind, str(tmp_path / 'long'), str(tmp_path / 'cache'), str(tmp_path / 'small')]
  grown = float(subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()[-1])
  assert grown < 100  # MB, the text itself some times over
  data = DataConfig(source=str(tmp_path / 'long'), cache_dir=str(tmp_path / 'cache'), tokenizer=kind, add_bos=False)
  dataset = built(data, 300)
  assert dataset.info['splits']['train']['tokens'] == len(dataset.tokenizer.encode(text))  # each but the first, and EOS
  assert dataset.info['splits']['train']['bytes'] == len(text)


def test_a_document_of_one_token_makes_no_prediction_and_is_counted(tmp_path):
  tokenizers.byte_tokenizer().save(tmp_path / 'tok')
  names = json.loads((tmp_path / 'tok' / 'tokenizer_config.json').read_text())
  (tmp_path / 'tok' / 'tokenizer_config.json').write_text(json.dumps(names | {'bos_token': None, 'eos_token': None}))
  write_lines(tmp_path / 'd' / 'train.jsonl', ['a', 'bc'])
  write_lines(tmp_path / 'd' / 'val.jsonl', ['de'])
  dataset = built(config(tmp_path / 'd', tmp_path, tokenizer=str(tmp_path / 'tok')))
  assert dataset.tokenizer.eos_id is None
  train = dataset.info['splits']['train']
  assert (train['documents'], train['too_short'], train['tokens']) == (1, 1, 1)


def test_the_split_by_hash_is_the_asked_share_and_never_changes():
  names = [f'a.jsonl:{i}' for i in range(20000)]
  chosen = [n for n in names if convert.split_of(n, 0.02) == 'validation']
  assert abs(len(chosen) / 20000 - 0.02) < 0.004
  assert set(chosen) <= {n for n in names if convert.split_of(n, 0.05) == 'validation'}
  assert ''.join(convert.split_of(f'x:{i}', 0.5)[0] for i in range(8)) == 'tvvtvvvt'


def test_the_command_prints_json_last_and_one_sentence_on_errors(tmp_path):
  main = pathlib.Path(prepare.__file__).parents[2] / 'experiments' / 'prepare_data.py'
  source = write_lines(tmp_path / 'a.jsonl', TEXTS)
  common = ['--tokenizer=byte', f'--cache_dir={tmp_path / "cache"}', f'--out={tmp_path / "out"}', '--seq_len=32']
  run = [sys.executable, str(main), *common, '--validation_fraction=0.2']
  done = subprocess.run([*run, f'--source={source}'], capture_output=True, text=True, check=True)
  result = json.loads(done.stdout.splitlines()[-1])
  assert result['splits']['train']['documents'] + result['splits']['validation']['documents'] == 60
  assert not result['found'] and 'train:' in done.stderr
  again = subprocess.run([*run, f'--source={source}'], capture_output=True, text=True, check=True)
  assert json.loads(again.stdout)['found']
  wrong = subprocess.run([*run, '--source=nowhere'], capture_output=True, text=True)
  assert wrong.returncode == 1 and wrong.stdout == ''
  assert wrong.stderr.splitlines()[-1].startswith("error: data.source = 'nowhere' does not exist")
  assert 'Traceback' not in wrong.stderr


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
  data = config(write_lines(tmp_path / 'a.jsonl', TEXTS), tmp_path)
  with pytest.raises(UserError, match='cannot be prepared: No such file or directory .*/proc/x'):
    prepare.prepare(data, 0, out='/proc/x', progress=False)
  with pytest.raises(UserError, match="no field 'txt'"):
    prepare.prepare(dataclasses.replace(data, text_field='txt'), 0, out=tmp_path / 'out', progress=False)
  assert not list(tmp_path.glob('out*'))
