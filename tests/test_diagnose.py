"""A diagnosis from run folders to the report: kept, taken up again, refused before anything is written."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import hf_folders
import lns_jax
import tiny
from lns_jax import config as config_lib
from lns_jax import diagnose, presets, samples, sharding, surgery
from lns_jax.data import sample as sample_lib
from lns_jax.data import tokenizers
from lns_jax.depth import record, scorecard
from lns_jax.errors import UserError
from lns_jax.interop import gguf_write
from lns_jax.interop.load import load_run_config
from lns_jax.train import checkpoint, loop, resume

CHOSEN = ('profile', 'layer_drop', 'theory', 'projection')


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
  assert len(list(out.glob('plots/*.png'))) == page.count('<svg')
  assert 'States in a plane' in page and 'projection_explained' in written and 'projection_points' not in written
  assert np.load(out / 'pre' / 'projection.npz')['projection_points'].shape[::2] == (len(written['projection_layers']), 2)
  assert list(out.glob('plots/*.svg')) and (out / 'scorecard.md').exists()
  monkeypatch.setattr(samples.Batches, '__iter__', lambda self: pytest.fail('a measure was taken again'))
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
  monkeypatch.setattr(samples.Batches, '__iter__', lambda self: pytest.fail('taken again'))
  take()
  _questions(file, 5, choices=2)
  with pytest.raises(pytest.fail.Exception, match='taken again'):  # other questions of the same name
    take()


def test_accuracy_of_the_next_token_is_a_task_and_is_taken_beside_what_is_named(run, tmp_path):
  diagnose.diagnose([str(run)], tmp_path, tokens=1024, task='accuracy',
                    chosen=['layer_drop', 'task_drop', 'task_block_drop', 'task_sublayer_drop'])
  found = json.loads((tmp_path / 'depth.json').read_text())
  assert 0 <= found['task_baseline'] <= 1 and found['task']['chance'] is None and found['baseline'] > 1
  page = (tmp_path / 'report.html').read_text()
  assert 'top-1 accuracy of the next token' in page and 'Guessing' not in page


def test_a_question_is_never_divided():
  mesh = sharding.make_mesh(config_lib.MeshConfig())
  rows = [{'tokens': np.full(16, 1 + i // 3), 'right': np.float32(i % 3)} for i in range(3 * 60)]
  batches = list(samples.Batches(rows, mesh, 3))
  assert {len(b['tokens']) % (3 * sharding.batch_parts(mesh)) for b in batches} == {0}
  for b in batches:
    for shard in b['tokens'].addressable_shards:
      assert (np.ptp(np.asarray(shard.data)[:, 0].reshape(-1, 3), axis=1) == 0).all()
  assert sum(int((np.asarray(b['tokens'])[:, 0] > 0).sum()) for b in batches) == 180
  sample = samples.Sample(rows, '', '', group=3, least=20)
  assert [len(sample.part(share)) for share in (1, 1 / 2, 1 / 10)] == [180, 90, 60]


def test_a_model_of_images_answers_no_questions():
  config = presets.load_config('vit_tiny').model
  sample = samples.Sample([{'images': np.zeros((8, 8, 3))}], '1 image', 'x')
  with pytest.raises(UserError, match='which answers no questions; --task=accuracy'):
    samples.open_task('runs/vit', config, None, 'x.jsonl', sample)
  assert 'of classes on 1 image' in samples.open_task('runs/vit', config, None, 'accuracy', sample).about['what']


def test_angles_are_stretched_in_the_report_and_raw_in_the_file(run, tmp_path):
  pages = {}
  for angles in ('raw', 'percentile'):  # the second takes up what the first has measured
    diagnose.diagnose([str(run)], tmp_path, tokens=1024, chosen=['profile'], angles=angles)
    pages[angles] = (tmp_path / 'report.html').read_text(), (tmp_path / 'depth.json').read_text()
  assert pages['raw'][1] == pages['percentile'][1]
  assert 'pre, rows stretched' in pages['percentile'][0] and 'rows stretched' not in pages['raw'][0]
  with pytest.raises(UserError, match="'ranks'; it is one of raw, percentile"):
    diagnose.diagnose([str(run)], tmp_path, angles='ranks')


def test_what_cannot_be_used_is_said_before_anything_is_written(run, tmp_path):
  (tmp_path / 'empty.txt').write_text('')
  (tmp_path / 'fresh' / 'checkpoints').mkdir(parents=True)
  for kwargs, words in (({'chosen': ['profil']}, "no measure 'profil'.*Did you mean 'profile'"),
                        ({'chosen': ['']}, "no measure ''.*Known: all, block_drop"),
                        ({'text': str(tmp_path / 'empty.txt')}, 'empty'),
                        ({'text': str(tmp_path / 'none.txt')}, 'none.txt.*does not exist'),
                        ({'task': 'acuracy'}, "neither 'accuracy' nor a file of questions"),
                        ({'task': str(tmp_path / 'empty.txt')}, 'holds no questions'),
                        ({'chosen': ['task_prune']}, 'task_prune needs a task'),
                        ({'seq_len': 4096}, 'longer than the 128 positions'),
                        ({'tokens': 0}, '--tokens=0.*1 or more'),
                        ({'dtype': 'float64'}, 'JAX_ENABLE_X64=1'),
                        ({'models': [str(run)] * 2}, 'given twice'), ({'models': []}, '--model.*empty'),
                        ({'models': [str(run), '']}, 'one of the names is empty'),
                        ({'models': [str(tmp_path)]}, 'neither a run folder, which has checkpoints, nor'),
                        ({'models': [str(tmp_path / 'fresh')]}, 'holds no finished checkpoint yet')):
    with pytest.raises(UserError, match=words):
      diagnose.diagnose(**{'models': [str(run)], 'out': tmp_path / 'out', **kwargs})
  assert not (tmp_path / 'out').exists()


def test_a_hugging_face_folder_is_measured_on_the_embedded_text_as_its_tokenizer_says(tmp_path):
  """And beside a model of another tokenizer by bits per byte of the same text."""
  a = hf_folders.of_text(tmp_path, 'a')  # of 64 positions
  b = tmp_path / 'b.gguf'
  gguf_write.write(hf_folders.of_text(tmp_path, 'of_b', tokenizer=tokenizers.train_bpe(['the quick brown fox'] * 99, 270),
                                      max_position_embeddings=4096), b, dtype='float32')
  found = diagnose.diagnose([str(a), str(b)], tmp_path / 'out', tokens=2048, chosen=['layer_drop'])
  models = json.loads((tmp_path / 'out' / 'depth.json').read_text())['models']
  data = dataclasses.replace(config_lib.DataConfig(), seq_len=64, add_bos=False)
  rows, _, _ = sample_lib.rows(data, tokenizers.byte_tokenizer(), 2048)
  assert models['a']['measures']['layer_drop']['rows'] == len(rows) == 2048 // 64  # no BOS, which its file does not add
  assert models['b.gguf']['measures']['layer_drop']['rows'] == 2048 // 512
  config, p, _ = lns_jax.load(a)
  targets = np.stack([r['targets'] for r in rows])
  z = np.asarray(lns_jax.forward(config, p, np.stack([r['tokens'] for r in rows]),
                                 segment_ids=np.stack([r['segment_ids'] for r in rows])), np.float64)
  nats = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, targets[..., None], -1)[..., 0]
  assert models['a']['baseline'] == pytest.approx(nats.mean(), rel=1e-5)
  assert models['a']['bits_per_byte'] == pytest.approx(nats.sum() / np.sum(targets < 256) / np.log(2), rel=1e-5)
  assert found['models']['b.gguf']['bits_per_byte'] == models['b.gguf']['bits_per_byte']
  page = (tmp_path / 'out' / 'report.html').read_text()
  assert 'bits per byte' in page and 'different tokens' in page and models['a']['text_hash'] == models['b.gguf']['text_hash']


def test_questions_to_a_hugging_face_folder(tmp_path):
  path = hf_folders.of_text(tmp_path, max_position_embeddings=512)
  config, _, tokenizer = lns_jax.load(path)
  sample = samples.Sample([{'tokens': np.zeros(4), 'segment_ids': np.ones(4)}], 'x', 'y')
  task = samples.open_task(str(path), config, tokenizer, str(_questions(tmp_path / 'q.jsonl', 4)), sample)
  assert task.about['questions'] == 4 and bytes(task.sample.rows[0]['tokens'][:10].tolist()) == b'def f0(x):'  # no BOS
  pytest.importorskip('lm_eval')
  assert samples.open_task(str(path), config, tokenizer, 'mmlu_dev_texts', sample).about['questions'] == 281


def test_what_a_model_that_is_no_run_cannot_be_measured_on(tmp_path):
  text, images = hf_folders.of_text(tmp_path), hf_folders.folder('vit', tmp_path)
  for model, kwargs, words in ((text, {'seq_len': 65}, '--seq_len=65 is longer than the 64 positions that .*text was'),
                               (images, {}, 'a model of images and not a run, so that its images are not known'),
                               (images, {'text': 'embedded'}, 'which has no use for --text'),
                               (hf_folders.folder('llama', tmp_path), {}, 'llama has no tokenizer, .* tokenizer.json')):
    with pytest.raises(UserError, match=words):
      diagnose.diagnose([str(model)], tmp_path / 'out', **kwargs)
  with pytest.raises(UserError, match=f'import_hf.py --model={text} --workdir=FOLDER makes one of it'):
    surgery.prune(text, tmp_path / 'out', drop_layers=[1])
  assert not (tmp_path / 'out').exists()


def test_a_folder_that_is_not_free_for_results_is_refused(run, tmp_path):
  before = {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}
  (tmp_path / 'file').write_text('')
  (tmp_path / 'taken' / 'pre').mkdir(parents=True)
  (tmp_path / 'taken' / 'pre' / 'theory.npz').mkdir()
  with resume.alone(tmp_path / 'taken'):
    for out, words in (('', '--out must be given'), (run, f'is a run folder.*{run}/depth would do'),
                       (run / 'checkpoints' / 'depth', 'inside the checkpoints'),
                       (tmp_path / 'file', 'cannot be used as --out'),
                       (tmp_path / 'file' / 'x', 'cannot be used as --out'),
                       (tmp_path / 'taken', 'another process is at work.*another --out')):
      with pytest.raises(UserError, match=words):
        diagnose.diagnose([str(run)], out, tokens=2048, chosen=['theory'])
  (tmp_path / 'locked' / '.lock').mkdir(parents=True)
  with pytest.raises(UserError, match='locked/.lock cannot be written: Is a directory; --out needs that file'):
    diagnose.diagnose([str(run)], tmp_path / 'locked', tokens=2048, chosen=['theory'])
  with pytest.raises(UserError, match='pre/theory.npz.* cannot be written'):
    diagnose.diagnose([str(run)], tmp_path / 'taken', tokens=2048, chosen=['theory'])
  assert not (tmp_path / 'taken' / 'depth.json').exists()
  assert before == {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}


def test_results_never_land_in_a_run_folder(run, tmp_path):
  before = {p: p.read_bytes() for p in run.parent.rglob('*') if p.is_file()}
  (tmp_path / 'link').symlink_to(run / 'checkpoints')
  for out, words in ((run.parent, f'results of pre would be written to {run}, which is a run folder'),
                     (run / 'tokenizer', f'inside the tokenizer of a run; {run}/depth would do'),
                     (tmp_path / 'link' / 'depth', 'inside the checkpoints of a run')):
    with pytest.raises(UserError, match=words):
      diagnose.diagnose([str(run)], out, tokens=1024, chosen=['theory'])
  assert before == {p: p.read_bytes() for p in run.parent.rglob('*') if p.is_file()}


@pytest.mark.parametrize('models, names', [
    (['..'], ['b']), (['.'], ['c']), (['../../x/pre', '../y/pre'], ['x_pre', 'y_pre']), (['../plots'], ['b_plots']),
    (['../plots', '/a/b/c'], ['b_plots', 'b_c']), (['/plots'], ['0_plots']), (['/a/pre', '/pre'], ['a_pre', 'pre']),
    (['/'], ['0']), (['hf://org/pre'], ['pre']), (['hf://..'], ['hf:'])])
def test_names_are_those_of_the_folders_themselves(models, names, tmp_path, monkeypatch):
  (tmp_path / 'a' / 'b' / 'c').mkdir(parents=True)
  monkeypatch.chdir(tmp_path / 'a' / 'b' / 'c')
  models = [m.replace('/a/b', str(tmp_path / 'a' / 'b')) for m in models]
  found = diagnose._names(models)
  assert list(found) == names and list(found.values()) == models


@pytest.mark.parametrize('other', ['../b/pre', '~/b/pre', 'link'])
def test_a_model_by_two_paths_is_given_twice(other, tmp_path, monkeypatch):
  (tmp_path / 'b' / 'pre').mkdir(parents=True)
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.chdir(tmp_path / 'b')
  (tmp_path / 'b' / 'link').symlink_to('pre')
  with pytest.raises(UserError, match='is given twice'):
    diagnose._names(['pre', other])


@pytest.mark.parametrize('path, words', [
    ('x' * 300, 'has 300 bytes, 255 at most'), ('a\0b', 'holds a NUL'), ('~nobody_of_that_name/x', 'home of a user')])
def test_what_no_file_can_be_named_is_a_sentence(path, words, run, tmp_path):
  for models, out in (([path], tmp_path / 'out'), ([str(run)], path)):
    with pytest.raises(UserError, match=words):
      diagnose.diagnose(models, out)
  assert list(tmp_path.iterdir()) == []


def test_a_damaged_record_of_training_is_said_before_anything_is_measured(run, tmp_path, monkeypatch):
  shutil.copytree(run, tmp_path / 'pre')
  with (tmp_path / 'pre' / 'metrics.jsonl').open('a') as file:
    file.write('[1]\n')
  monkeypatch.setenv('HOME', str(tmp_path))
  with pytest.raises(UserError, match=r'metrics.jsonl, line \d+ is damaged'):
    diagnose.diagnose(['~/pre'], tmp_path / 'out', tokens=1024, chosen=['theory'])
  assert not (tmp_path / 'out').exists()


def test_a_bar_in_a_name_does_not_end_a_cell():
  head, _, line, *rest = scorecard.markdown({'a|b': {'layers': 2, 'tokens': 8}}).splitlines()
  assert line.startswith(r'| a\|b | 2 |') and line.replace(r'\|', '').count('|') == head.count('|') and not rest


def saved(workdir, run, num_layers: int, change=lambda params: None):
  """A run folder of an untrained model with the settings and the tokenizer of another."""
  _, config = load_run_config(run)
  config = dataclasses.replace(config, model=tiny.rebuilt(config.model, num_layers=num_layers))
  params = tiny.params(dataclasses.replace(config.model, loop='unrolled'))
  change(params)
  with checkpoint.Checkpointer(workdir / 'checkpoints', config.checkpoint) as saver:
    saver.save(1, params=params, opt_state={'count': np.zeros(1)}, data={}, config=config_lib.to_dict(config))
  shutil.copytree(run / 'tokenizer', workdir / 'tokenizer')
  shutil.copy(run / 'run_info.json', workdir)
  return str(workdir)


def test_a_measure_that_cannot_be_taken_is_named_and_the_others_stand(run, tmp_path, capsys):
  (tmp_path / 'short.txt').write_text('def f(x): return x')
  diagnose.diagnose([str(run)], tmp_path / 'out', text=str(tmp_path / 'short.txt'), chosen=['layer_drop', 'linear'])
  found = json.loads((tmp_path / 'out' / 'depth.json').read_text())
  assert list(found['measures']) == ['layer_drop'] and 'a linear map of 32 units' in found['refused']['linear']
  assert 'linear was not taken' in capsys.readouterr().err
  assert 'a linear map of 32 units' in (tmp_path / 'out' / 'report.html').read_text()
  assert set(found['intervals']['layer_drop']['low']) == {None}  # one row has no interval
  with pytest.raises(UserError, match='a linear map of 32 units'):  # when nothing else was asked for
    diagnose.diagnose([str(run)], tmp_path / 'two', text=str(tmp_path / 'short.txt'), chosen=['linear'])


def test_a_call_for_other_measures_adds_to_what_is_there(run, tmp_path):
  take = lambda tokens, *chosen: diagnose.diagnose([str(run)], tmp_path, tokens=tokens, chosen=chosen)
  take(1024, 'layer_drop')
  take(1024, 'profile')
  found = json.loads((tmp_path / 'depth.json').read_text())
  assert set(found['measures']) == {'layer_drop', 'profile'} and found['layer_drop'] and found['variance']
  take(512, 'profile')  # what was taken on other rows is not mixed with it
  assert set(json.loads((tmp_path / 'depth.json').read_text())['measures']) == {'profile'}


def test_a_run_whose_text_has_changed_is_not_measured_on_other_text_in_silence(run, tmp_path):
  other = saved(tmp_path / 'other', run, 2)
  info = json.loads((tmp_path / 'other' / 'run_info.json').read_text())
  (tmp_path / 'other' / 'run_info.json').write_text(json.dumps(info | {'corpus_hash': '0' * 64}))
  with pytest.raises(UserError, match='was trained on a corpus with hash 000000000000'):
    diagnose.diagnose([other], tmp_path / 'out', tokens=1024, chosen=['profile'])


def test_a_weight_that_is_not_finite_is_named_with_its_model_and_layer(run, tmp_path):
  def spoil(params):
    params['layers']['3']['mlp']['up'] = params['layers']['3']['mlp']['up'].at[1, 2].set(np.nan)
  bad = saved(tmp_path / 'bad', run, 3, spoil)
  with pytest.raises(UserError, match='bad: the weight layers/3/mlp/up is not finite'):
    diagnose.diagnose([str(run), bad], tmp_path / 'out', tokens=2048)
  assert not (tmp_path / 'out').exists()


def test_a_model_with_one_layer_is_measured_where_nothing_needs_a_second(run, tmp_path):
  one = saved(tmp_path / 'one', run, 1)
  for name in ('layer_drop', 'perturb', 'prune', 'block_drop', 'linear'):
    with pytest.raises(UserError, match=f'{name} needs a model with 2 layers or more, this one has 1'):
      diagnose.diagnose([one], tmp_path / 'out', chosen=[name])
  diagnose.diagnose([one], tmp_path / 'out', tokens=1, chosen=('profile', 'theory', 'lens', 'cka'))
  written = json.loads((tmp_path / 'out' / 'depth.json').read_text())
  assert written['layers'] == 1 and len(written['variance']) == 2 and 'at least 4' in written['growth']
  assert written['measures']['profile']['rows'] == 1  # the sample is never less than a row


def test_text_that_is_not_utf8_or_shorter_than_a_row_is_measured_and_said(run, tmp_path):
  (tmp_path / 'latin.txt').write_bytes('café au lait'.encode('latin-1'))
  diagnose.diagnose([str(run)], tmp_path / 'out', text=str(tmp_path / 'latin.txt'), chosen=['theory', 'theory'])
  written = json.loads((tmp_path / 'out' / 'depth.json').read_text())
  assert '1 rows of' in written['sample'] and '1 documents of which are not UTF-8' in written['sample']


def test_what_is_kept_is_taken_again_when_it_is_damaged_or_of_another_sample(run, tmp_path):
  out = tmp_path / 'out'
  def found(seq_len=128):
    diagnose.diagnose([str(run)], out, tokens=2048, chosen=['theory'], seq_len=seq_len)
    return without_times(json.loads((out / 'depth.json').read_text()))
  whole = found()
  kept = out / 'pre' / 'theory.npz'
  for path in (out / 'depth.json', out / 'pre' / 'depth.json', kept):
    path.write_bytes(path.read_bytes()[:-20])
  assert found() == whole
  shorter = found(64)  # as many rows of the same text
  assert shorter['measures']['theory']['rows'] == whole['measures']['theory']['rows']
  assert shorter['theory_log_bound'] != whole['theory_log_bound']


def without_times(written: dict) -> dict:
  return written | {'measures': {kind: {k: v for k, v in taken.items() if k != 'seconds'}
                                 for kind, taken in written['measures'].items()}}


def start(run, out, *arguments, devices: int = 1) -> subprocess.Popen:
  script = pathlib.Path(__file__).parent.parent / 'experiments' / 'diagnose.py'
  env = os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'}
  return subprocess.Popen([sys.executable, str(script), f'--model={run}', f'--out={out}', *arguments], env=env,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_measure_it_goes_on_to_the_same_numbers(run, tmp_path):
  command = functools.partial(start, run, tmp_path / 'killed')
  arguments = ('--tokens=2048', '--measures=profile,layer_drop,jacobian,perturb')
  for done in ('profile', 'layer_drop', 'jacobian'):
    process = command(*arguments)
    while not (tmp_path / 'killed' / 'pre' / f'{done}.npz').exists():
      assert process.poll() is None, process.stderr.read()
      time.sleep(0.02)
    time.sleep(0.3)  # into the next one
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / 'killed' / 'depth.json').exists()
  kept = {p: p.stat().st_mtime_ns for p in (tmp_path / 'killed' / 'pre').glob('*.npz')}
  assert {p.stem for p in kept} == {'profile', 'layer_drop', 'jacobian'}
  for process in (command(*arguments), start(run, tmp_path / 'whole', *arguments)):
    assert process.wait() == 0, process.stderr.read()
  assert all(p.stat().st_mtime_ns == then for p, then in kept.items())
  killed, whole = (json.loads((tmp_path / out / 'depth.json').read_text()) for out in ('killed', 'whole'))
  assert without_times(killed) == without_times(whole)


@pytest.mark.slow
def test_the_command_finds_the_same_digits_on_eight_devices_as_on_one(run, tmp_path):
  """Thirty-five rows of 128 tokens: the second batch is of padding but for three rows."""
  for devices in (1, 8):
    process = start(run, tmp_path / str(devices), '--tokens=4480', devices=devices)
    assert process.wait() == 0, process.stderr.read()
  one, eight = (json.loads((tmp_path / str(devices) / 'depth.json').read_text()) for devices in (1, 8))
  assert one.keys() == eight.keys() and one['measures']['profile']['rows'] >= 35
  for name in one.keys() - {'measures', 'intervals'}:
    close(one[name], eight[name], name)
  for name, ends in one['intervals'].items():
    for end in ends:
      close(ends[end], eight['intervals'][name][end], name)


def close(one, other, name):
  """Equal, or as near as float32 sums in another order, and what Lanczos steps make of that; null is null."""
  if isinstance(one, (str, dict, type(None))):
    assert one == other, name
    return
  one, other = (np.array(v, np.float64) for v in (one, other))
  amplified = name.endswith(('spectrum', 'residual'))
  np.testing.assert_allclose(other, one, rtol=0.1 if amplified else 1e-5, atol=1e-4 if amplified else 5e-6, err_msg=name)


def test_what_a_measure_found_is_read_back_as_it_was(tmp_path):
  e = record.Estimate(np.array([1.0, np.nan]), np.zeros(2), np.ones(2), 7.0)
  record.save(tmp_path / 'x.npz', {'a': e, 'word': 'b', 'list': [1, 2]}, {'seed': 0})
  found, about = record.load(tmp_path / 'x.npz')
  assert about == {'seed': 0} and found['word'] == 'b' and found['list'] == [1, 2] and found['a'].tokens == 7
  np.testing.assert_array_equal(found['a'].value, e.value)
  assert record.load(tmp_path / 'y.npz') is None


def test_a_damaged_file_is_none_or_what_it_was(tmp_path):
  path, e = tmp_path / 'x.npz', record.Estimate(np.arange(3.0), np.zeros(3), np.ones(3), 7.0)
  record.save(path, {'a': e, 'word': 'b', 'b': np.arange(5)}, {'seed': 0})
  whole, bits = path.read_bytes(), np.random.default_rng(0).integers(0, 8, 10_000)
  damaged = [whole[:i] + bytes([byte ^ 1 << bits[i]]) + whole[i + 1:] for i, byte in enumerate(whole) if i % 3 == 0]
  damaged += [whole[:i] for i in range(0, len(whole), 50)] + [b'{}']
  for content in damaged:
    path.write_bytes(content)
    loaded = record.load(path)
    if loaded is not None:
      found, about = loaded
      assert about == {'seed': 0} and found['word'] == 'b' and found.keys() == {'a', 'b', 'word'}
      np.testing.assert_array_equal(found['b'], np.arange(5))
      for part in record.PARTS:
        np.testing.assert_array_equal(getattr(found['a'], part), getattr(e, part))
