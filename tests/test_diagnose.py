"""A diagnosis from run folders to the report: kept, taken up again, refused before anything is written."""

import dataclasses
import json

import numpy as np
import pytest

from lns_jax import config as config_lib
from lns_jax import diagnose, presets, sharding
from lns_jax.depth import record
from lns_jax.errors import UserError
from lns_jax.train import loop

CHOSEN = ('profile', 'layer_drop', 'theory')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  base = presets.load_config('quickstart:tiny')
  workdir = tmp_path_factory.mktemp('diagnosed') / 'pre'
  loop.train(dataclasses.replace(base, train=dataclasses.replace(base.train, steps=2, tensorboard=False),
                                 optimizer=dataclasses.replace(base.optimizer, warmup_steps=1)), workdir)
  return workdir


def test_numbers_report_and_a_second_call_that_measures_nothing(run, tmp_path, monkeypatch):
  found = diagnose.diagnose([str(run)], tmp_path / 'out', tokens=2048, chosen=CHOSEN)
  out = tmp_path / 'out'
  written = json.loads((out / 'depth.json').read_text())
  L = written['layers']
  assert len(written['variance']) == L + 1 and len(written['layer_drop']) == L and written['tokens'] <= 2048
  assert found['models']['pre']['loss'] == written['baseline']
  page = (out / 'report.html').read_text()
  assert 'Removal of single layers' in page and 'Theory and measurement' in page and '<script' not in page
  assert list(out.glob('plots/*.png')) and list(out.glob('plots/*.svg')) and (out / 'scorecard.md').exists()
  monkeypatch.setattr(diagnose.Batches, '__iter__', lambda self: pytest.fail('a measure was taken again'))
  again = diagnose.diagnose([str(run)], out, tokens=2048, chosen=CHOSEN)
  assert again['models'] == found['models'] and json.loads((out / 'depth.json').read_text()) == written


def _questions(path, number, choices=3):
  path.write_text(''.join(json.dumps({'context': f'def f{i}(x):', 'choices': [f'return {c}' for c in 'xyz'[:choices]],
                                      'answer': i % choices}) + '\n' for i in range(number)))
  return path


def test_the_accuracy_of_a_task_without_each_layer(run, tmp_path, monkeypatch):
  file = _questions(tmp_path / 'abc.jsonl', 5)
  take = lambda: diagnose.diagnose([str(run)], tmp_path / 'out', tokens=1024, task=str(file),
                                   chosen=['task_drop', 'task_prune'])
  take()
  found = json.loads((tmp_path / 'out' / 'depth.json').read_text())
  L = found['layers']
  right = found['task_baseline']
  assert 5 * right == round(5 * right) and found['task']['chance'] == pytest.approx(1 / 3)
  assert len(found['task_drop']) == L and len(found['task_prune_rise']) == L - 1 == len(found['task_prune_order'])
  assert all(-right <= change <= 1 - right for change in found['task_drop'])
  assert 'task_attn_drop' not in found and 'layer_drop' not in found and found['intervals']['task_drop']['low']
  assert found['task']['questions'] == 5 and found['measures']['task_drop']['rows'] == 15
  page = (tmp_path / 'out' / 'report.html').read_text()
  assert 'Task accuracy without each layer' in page and 'over 5 questions of abc' in page and 'Guessing' in page
  monkeypatch.setattr(diagnose.Batches, '__iter__', lambda self: pytest.fail('taken again'))
  take()
  _questions(file, 5, choices=2)
  with pytest.raises(pytest.fail.Exception, match='taken again'):  # other questions of the same name
    take()


def test_accuracy_of_the_next_token_is_a_task_and_is_taken_beside_what_is_named(run, tmp_path):
  diagnose.diagnose([str(run)], tmp_path, tokens=1024, task='accuracy', chosen=['layer_drop', 'task_drop'])
  found = json.loads((tmp_path / 'depth.json').read_text())
  assert 0 <= found['task_baseline'] <= 1 and found['task']['chance'] is None and found['baseline'] > 1
  page = (tmp_path / 'report.html').read_text()
  assert 'top-1 accuracy of the next token' in page and 'Guessing' not in page


def test_a_question_is_never_divided():
  mesh = sharding.make_mesh(config_lib.MeshConfig())
  rows = [{'tokens': np.full(16, 1 + i // 3), 'right': np.float32(i % 3)} for i in range(3 * 60)]
  batches = list(diagnose.Batches(rows, mesh, 3))
  assert {len(b['tokens']) % (3 * sharding.batch_parts(mesh)) for b in batches} == {0}
  for b in batches:
    for shard in b['tokens'].addressable_shards:
      assert (np.ptp(np.asarray(shard.data)[:, 0].reshape(-1, 3), axis=1) == 0).all()
  assert sum(int((np.asarray(b['tokens'])[:, 0] > 0).sum()) for b in batches) == 180
  sample = diagnose.Sample(rows, '', '', group=3, least=20)
  assert [len(sample.part(share)) for share in (1, 1 / 2, 1 / 10)] == [180, 90, 60]


def test_a_model_of_images_answers_no_questions():
  config = presets.load_config('vit_tiny').model
  sample = diagnose.Sample([{'images': np.zeros((8, 8, 3))}], '1 image', 'x')
  with pytest.raises(UserError, match='which answers no questions; --task=accuracy'):
    diagnose._task('runs/vit', config, None, 'x.jsonl', sample)
  assert 'of classes on 1 image' in diagnose._task('runs/vit', config, None, 'accuracy', sample).about['what']


def test_what_cannot_be_used_is_said_before_anything_is_written(run, tmp_path):
  (tmp_path / 'empty.txt').write_text('')
  for kwargs, words in (({'chosen': ['profil']}, "no measure 'profil'.*Did you mean 'profile'"),
                        ({'text': str(tmp_path / 'empty.txt')}, 'empty'),
                        ({'seq_len': 4096}, 'longer than the 128 positions'),
                        ({'task': 'acuracy'}, "neither 'accuracy' nor a file of questions"),
                        ({'task': str(tmp_path / 'empty.txt')}, 'holds no questions'),
                        ({'chosen': ['task_prune']}, 'task_prune needs a task')):
    with pytest.raises(UserError, match=words):
      diagnose.diagnose([str(run)], tmp_path / 'out', **kwargs)
  with pytest.raises(UserError, match='given twice'):
    diagnose.diagnose([str(run), str(run)], tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_what_a_measure_found_is_read_back_as_it_was(tmp_path):
  e = record.Estimate(np.array([1.0, np.nan]), np.zeros(2), np.ones(2), 7.0)
  record.save(tmp_path / 'x.npz', {'a': e, 'word': 'b', 'list': [1, 2]}, {'seed': 0})
  found, about = record.load(tmp_path / 'x.npz')
  assert about == {'seed': 0} and found['word'] == 'b' and found['list'] == [1, 2] and found['a'].tokens == 7
  np.testing.assert_array_equal(found['a'].value, e.value)
  (tmp_path / 'x.npz').write_bytes((tmp_path / 'x.npz').read_bytes()[:-40])
  assert record.load(tmp_path / 'x.npz') is None and record.load(tmp_path / 'y.npz') is None
