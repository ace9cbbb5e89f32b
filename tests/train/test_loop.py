"""Whole runs on real text: what is left behind, going on, and what is refused."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

import lns_jax
from lns_jax import runs
from lns_jax.config import RunConfig, from_dict, to_dict
from lns_jax.errors import Diverged, Preempted, UserError
from lns_jax.layers import schemes
from lns_jax.models import layout
from lns_jax.train import log, loop, resume
from tiny import leaves_close

TEXT = pathlib.Path(__file__).parent.parent.parent / 'lns_jax'


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """Our own sources as a small corpus."""
  folder = tmp_path_factory.mktemp('text')
  for path in sorted(TEXT.rglob('*.py')):
    (folder / f"{'_'.join(path.relative_to(TEXT).parts)}.txt").write_text(path.read_text())
  return folder


def settings(text, **groups) -> RunConfig:
  base = {
      'model': {'vocab_size': 258, 'd_model': 16, 'd_ff': 32, 'num_layers': 3, 'num_heads': 2, 'scheme': 'lns',
                'loop': 'scan'},
      'data': {'source': str(text), 'tokenizer': 'byte', 'seq_len': 32, 'validation_fraction': 0.1},
      'optimizer': {'lr': 1e-2, 'warmup_steps': 2},
      'train': {'steps': 6, 'batch_size': 8, 'log_every': 1, 'layer_stats_every': 2, 'tensorboard': False},
      'eval': {'max_tokens': 2048}, 'checkpoint': {'every': 2, 'keep': 3}}
  return from_dict(RunConfig, {k: base.get(k, {}) | groups.get(k, {}) for k in base | groups})


def final(workdir):
  config, params, _ = lns_jax.load(workdir)
  return layout.unstack(params)


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope='module')
def finished(text, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  return workdir, loop.train(settings(text), workdir)


def test_a_run_leaves_what_it_promises(finished):
  workdir, result = finished
  info = json.loads((workdir / 'run_info.json').read_text())
  for key in ('command', 'commit', 'versions', 'hardware', 'corpus_hash', 'config'):
    assert key in info
  assert info['config']['model']['scheme'] == 'lns'
  records = log.read(workdir / 'metrics.jsonl')
  steps = [r for r in records if 'loss' in r]
  assert [r['step'] for r in steps] == [1, 2, 3, 4, 5, 6]
  assert [r['lr'] for r in steps[:3]] == pytest.approx([0, 5e-3, 1e-2])
  assert steps[-1]['tokens'] == result['train_tokens'] <= 6 * 8 * 32
  assert [r['step'] for r in records if 'variance' in r] == [1, 2, 4, 6]
  assert all(len(r['variance']) == 4 and len(r['attn_ratio']) == 3 for r in records if 'variance' in r)
  assert all(len(r['layer_decrease']) == 3 and r['predicted_decrease'] is not None for r in records if 'variance' in r)
  assert steps[-1]['loss'] < steps[0]['loss'] and abs(steps[0]['loss'] - np.log(258)) < 0.1
  assert json.loads((workdir / 'result.json').read_text())['loss'] == result['loss']
  assert (workdir / 'tokenizer').is_dir()


def test_the_rates_of_the_steps_fit_the_time_they_took_together(finished):
  """A CPU may run a step while it is being started: the last reading then takes no time of its own."""
  workdir, result = finished
  records = [r for r in log.read(workdir / 'metrics.jsonl') if 'loss' in r]
  seconds = [8 * 32 / r['tokens_per_second'] for r in records]
  assert 0.2 * result['step_seconds'] < sum(seconds) < 2 * result['step_seconds']
  assert min(seconds) > 1e-3 * max(seconds)


def test_evaluation_of_the_folder_is_that_of_the_run(finished):
  workdir, result = finished
  found = runs.evaluate(workdir, parity=True)
  assert found['loss'] == pytest.approx(result['loss'], rel=1e-6) and found['tokens'] == result['tokens']
  assert found['paper_loss'] < found['loss']


def test_a_finished_run_is_not_run_again(finished, text):
  workdir, result = finished
  again = loop.train(settings(text), workdir)
  assert again['loss'] == pytest.approx(result['loss'], rel=1e-7)
  assert again['train_loss'] == result['train_loss'] and again['tokens_per_second'] == result['tokens_per_second']


def test_a_model_in_the_middle_of_its_ramp_is_loaded_as_the_function_it_was(text, tmp_path):
  result = loop.train(settings(text, model={'scheme': 'prores', 'prores_steps': 3}), tmp_path)
  config, params, _ = lns_jax.load(tmp_path)
  assert config.ramp_step == 6  # of 9 until layer 3 is whole
  assert runs.evaluate(tmp_path)['loss'] == pytest.approx(result['loss'], rel=1e-6)
  batch = {'tokens': np.arange(16).reshape(1, 16)}
  finished = dataclasses.replace(config, ramp_step=-1)
  assert np.abs(lns_jax.forward(config, params, **batch) - lns_jax.forward(finished, params, **batch)).max() > 1e-4


class Stop(Exception):
  pass


def interrupted(config, workdir, at, monkeypatch):
  """Runs until the metrics of step `at` are read, then dies without any clean-up of the loop's own."""
  read = loop.Trainer.read
  def dying(self, step, *args):
    read(self, step, *args)
    if step == at:
      raise Stop
  with monkeypatch.context() as patch:
    patch.setattr(loop.Trainer, 'read', dying)
    with pytest.raises(Stop):
      loop.train(config, workdir)


@pytest.mark.parametrize('loop_kind, scheme', [
    ('unrolled', 'lns'), ('scan', 'lns'),
    *(pytest.param('scan', scheme, marks=pytest.mark.slow) for scheme in ('prores', 'admin'))])
def test_going_on_twice_equals_never_stopped_bit_for_bit(text, tmp_path, monkeypatch, loop_kind, scheme):
  """Known fault C1. A growing factor goes on where it was; a start from data is not profiled again."""
  config = settings(text, model={'loop': loop_kind, 'scheme': scheme, 'prores_steps': 3}, train={'accumulation': 1})
  loop.train(config, tmp_path / 'whole')
  interrupted(config, tmp_path / 'parts', 3, monkeypatch)
  interrupted(config, tmp_path / 'parts', 5, monkeypatch)
  loop.train(config, tmp_path / 'parts')
  same(final(tmp_path / 'parts'), final(tmp_path / 'whole'))
  pick = lambda d: [{k: r[k] for k in ('step', 'loss', 'lr', 'grad_norm', 'tokens')}
                    for r in log.read(tmp_path / d / 'metrics.jsonl') if 'loss' in r]
  assert pick('parts') == pick('whole') and [r['step'] for r in pick('parts')] == [1, 2, 3, 4, 5, 6]
  if scheme == 'admin':
    check_types_of_a_cast_model(tmp_path / 'whole')


def check_types_of_a_cast_model(workdir):
  """Learned factors stay float32 whatever a model is loaded as."""
  _, params, _ = lns_jax.load(workdir, dtype='bfloat16')
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    assert str(leaf.dtype) == ('float32' if path[-1].key in schemes.LEARNED else 'bfloat16'), path


def test_a_run_goes_on_with_the_other_loop(text, tmp_path, monkeypatch):
  # eps = 1 keeps updates proportional to gradients: with a small one Adam makes rounding errors as large as its steps.
  optimizer = {'lr': 1.0, 'eps': 1.0}
  scan, unrolled = (settings(text, model={'loop': kind}, optimizer=optimizer) for kind in ('scan', 'unrolled'))
  loop.train(unrolled, tmp_path / 'whole')
  interrupted(scan, tmp_path / 'parts', 3, monkeypatch)
  loop.train(unrolled, tmp_path / 'parts')
  leaves_close(final(tmp_path / 'parts'), final(tmp_path / 'whole'), 1e-5)


def test_sigterm_saves_the_step_and_says_so(text, tmp_path, monkeypatch):
  import os
  import signal
  read = loop.Trainer.read
  def signalled(self, step, *args):
    read(self, step, *args)
    if step == 3:
      os.kill(os.getpid(), signal.SIGTERM)
  config = settings(text, checkpoint={'every': 0})
  with monkeypatch.context() as patch:
    patch.setattr(loop.Trainer, 'read', signalled)
    with pytest.raises(Preempted, match='saved step [45] of 6'):
      loop.train(config, tmp_path / 'run')
  loop.train(config, tmp_path / 'run')
  loop.train(config, tmp_path / 'whole')
  same(final(tmp_path / 'run'), final(tmp_path / 'whole'))


def test_sigterm_in_an_evaluation_saves_and_the_evaluation_is_made_up_for(text, tmp_path, monkeypatch):
  """Known fault C6: an evaluation can outlast the grace time."""
  import os
  import signal
  config = settings(text, checkpoint={'every': 0}, eval={'every': 4})
  evaluated = loop.evaluate.evaluate
  def signalled(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return evaluated(*args, **kwargs)
  with monkeypatch.context() as patch:
    patch.setattr(loop.evaluate, 'evaluate', signalled)
    with pytest.raises(Preempted, match='saved step 4 of 6'):
      loop.train(config, tmp_path / 'run')
  loop.train(config, tmp_path / 'run')
  loop.train(config, tmp_path / 'whole')
  curves = [[(r['step'], r['val_loss']) for r in log.read(tmp_path / d / 'metrics.jsonl') if 'val_loss' in r]
            for d in ('run', 'whole')]
  assert curves[0] == curves[1] and [c[0] for c in curves[0]] == [4, 6]
  same(final(tmp_path / 'run'), final(tmp_path / 'whole'))


def test_a_result_without_its_checkpoint_or_of_other_settings_is_not_the_runs(text, tmp_path):
  import shutil
  loop.train(settings(text, model={'scheme': 'pre'}), tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run' / 'checkpoints')
  lns = loop.train(settings(text), tmp_path / 'run')
  assert json.loads((tmp_path / 'run' / 'run_info.json').read_text())['config']['model']['scheme'] == 'lns'
  assert lns['loss'] == pytest.approx(loop.train(settings(text), tmp_path / 'other')['loss'], abs=0)
  less = loop.train(settings(text, eval={'max_tokens': 512}), tmp_path / 'run')  # evaluated anew, not trained anew
  assert less['tokens'] <= 512 < lns['tokens'] and less['train_loss'] == lns['train_loss']


def test_two_processes_do_not_train_in_one_folder(text, tmp_path):
  (tmp_path / 'run').mkdir()
  with loop.resume.alone(tmp_path / 'run'):
    with pytest.raises(UserError, match='another process is at work in .*another --workdir'):
      loop.train(settings(tmp_path / 'none'), tmp_path / 'run')  # before data are looked for


def test_an_absurd_rate_reaches_no_checkpoint(text, tmp_path):
  with pytest.raises(Diverged, match='nothing was updated and there is no checkpoint yet'):
    loop.train(settings(text, optimizer={'lr': 1e39, 'warmup_steps': 0}, checkpoint={'every': 1}), tmp_path / 'run')
  assert not [p for p in (tmp_path / 'run' / 'checkpoints').iterdir() if p.name.isdigit()]


def test_lost_small_files_are_made_again(text, tmp_path):
  first = loop.train(settings(text), tmp_path / 'run')
  for name in ('result.json', 'run_info.json', 'metrics.jsonl'):
    (tmp_path / 'run' / name).unlink()
  assert loop.train(settings(text), tmp_path / 'run')['loss'] == first['loss']
  (tmp_path / 'run' / 'result.json').write_text('')
  loop.train(settings(text), tmp_path / 'run')
  (tmp_path / 'run' / 'run_info.json').unlink()
  loop.train(settings(text), tmp_path / 'run')
  assert runs.evaluate(tmp_path / 'run')['step'] == 6
  assert len([r for r in log.read(tmp_path / 'run' / 'metrics.jsonl') if 'val_loss' in r]) == 1


def test_a_damaged_last_checkpoint_is_trained_again(text, tmp_path):
  first = loop.train(settings(text), tmp_path / 'run')
  victim = max((tmp_path / 'run/checkpoints/6/params').rglob('*'), key=lambda p: p.stat().st_size if p.is_file() else 0)
  victim.write_bytes(b'x' * victim.stat().st_size)
  assert loop.train(settings(text), tmp_path / 'run')['loss'] == first['loss']
  assert (tmp_path / 'run/checkpoints/6').is_dir() and (tmp_path / 'run/checkpoints/6.damaged').is_dir()


def test_the_settings_are_printed(text, tmp_path, capfd):
  loop.train(settings(text, train={'steps': 2}), tmp_path / 'run')
  printed = capfd.readouterr().err
  assert "scheme='lns'" in printed and "precision='float32'" in printed and 'warmup_steps=2' in printed


@pytest.mark.parametrize('change, words', [
    ({'model': {'scheme': 'pre'}}, ["model.scheme = 'lns'", "'pre'"]),
    ({'model': {'num_layers': 4}}, ['model.', '4']),
    ({'model': {'d_model': 32}}, ['model.d_model = 16', '32']),
    ({'model': {'tie_embeddings': True}}, ['model.tie_embeddings = False', 'True']),
    ({'optimizer': {'lr': 5e-3}}, ['optimizer.lr = 0.01', '0.005']),
    ({'train': {'steps': 8}}, ['train.steps = 6', '8']),
    ({'data': {'seq_len': 64}}, ['data.seq_len = 32', '64']),
])
def test_another_model_is_refused_by_the_name_of_the_field(finished, text, change, words):
  """Known fault C10: pre and lns have the same tree, so that only the config tells them apart."""
  workdir, _ = finished
  before = sorted(p.name for p in (workdir / 'checkpoints').iterdir())
  with pytest.raises(UserError) as refusal:
    loop.train(settings(text, **change), workdir)
  for word in words:
    assert word in str(refusal.value)
  assert sorted(p.name for p in (workdir / 'checkpoints').iterdir()) == before


def test_a_batch_may_be_cut_into_more_parts_when_a_run_goes_on(text, tmp_path, monkeypatch):
  """On fewer chips, which the same rows would not fit at once."""
  config, parts = (settings(text, train={'batch_size': 16, 'accumulation': n}) for n in (1, 2))
  interrupted(config, tmp_path / 'run', 3, monkeypatch)
  whole = loop.train(config, tmp_path / 'whole')['loss']
  assert loop.train(parts, tmp_path / 'run')['loss'] == pytest.approx(whole, rel=1e-6)


def test_another_corpus_is_refused(finished, text, tmp_path):
  workdir, _ = finished
  other = tmp_path / 'text'
  other.mkdir()
  for path in text.iterdir():
    (other / path.name).write_text(path.read_text() + '\n')
  with pytest.raises(UserError, match='corpus with hash'):
    loop.train(settings(other), workdir)


def test_a_finished_run_is_not_the_result_of_changed_text(text, tmp_path):
  import shutil
  shutil.copytree(text, tmp_path / 'text')
  config = settings(tmp_path / 'text')
  loop.train(config, tmp_path / 'run')
  changed = next((tmp_path / 'text').iterdir())
  changed.write_text(changed.read_text() + 'one more line')
  with pytest.raises(UserError, match='corpus with hash'):
    loop.train(config, tmp_path / 'run')


def test_a_run_that_blows_up_stops_keeps_its_checkpoint_and_names_the_place(text, tmp_path, monkeypatch):
  config = settings(text)
  interrupted(config, tmp_path / 'run', 3, monkeypatch)
  fresh = loop.resume.restore_or_init
  def poisoned(run, saver):
    state, position = fresh(run, saver)
    down = state.params['layers']['1-3']['mlp']['down']
    state.params['layers']['1-3']['mlp']['down'] = down.at[1, 0, 0].set(np.nan)
    return state, position
  monkeypatch.setattr(loop.resume, 'restore_or_init', poisoned)
  with pytest.raises(Diverged, match=r'step 3: .* first in layer 2, on rows 16 to 23 .* checkpoint is of step 2'):
    loop.train(config, tmp_path / 'run')
  monkeypatch.setattr(loop.resume, 'restore_or_init', fresh)
  loop.train(config, tmp_path / 'run')  # and it can go on
  assert np.isfinite(final(tmp_path / 'run')['layers']['2']['mlp']['down']).all()


def test_a_target_outside_of_the_vocabulary_stops_the_run_and_is_named(text, tmp_path, monkeypatch):
  place = loop.evaluate.place
  def spoiled(mesh, batch):
    batch['targets'][3, 0] = -1
    return place(mesh, batch)
  monkeypatch.setattr(loop.evaluate, 'place', spoiled)
  with pytest.raises(Diverged, match='first in the target -1 at position 0 of row 3 of the batch'):
    loop.train(settings(text), tmp_path / 'run')


def test_impossible_batches_are_refused_before_anything_is_built(text, tmp_path):
  with pytest.raises(UserError, match='12 .*8 devices.*8 or 16 would be'):
    loop.train(settings(text, train={'batch_size': 12}), tmp_path / 'run')
  with pytest.raises(UserError, match='258 tokens but model.vocab_size is 200'):
    loop.train(settings(text, model={'vocab_size': 200}), tmp_path / 'run')


def test_a_set_smaller_than_a_batch_is_refused_before_compiling(tmp_path, monkeypatch):
  """Known fault T7."""
  (tmp_path / 'text').mkdir()
  for i in range(40):
    (tmp_path / 'text' / f'{i}.txt').write_text('a few words')
  monkeypatch.setattr(loop.Run, 'compile_train_step', lambda self: pytest.fail('compiled'))
  with pytest.raises(UserError, match=r'\d+ training rows .* 64'):
    loop.train(settings(tmp_path / 'text', train={'batch_size': 64}), tmp_path / 'run')


def test_a_remote_run_folder_is_refused():
  with pytest.raises(UserError, match='s3://bucket/run cannot be a run folder: gs://'):
    loop.train(RunConfig(), 's3://bucket/run')


def test_comparison_is_paired_and_refuses_other_corpora(finished, text, tmp_path):
  workdir, result = finished
  pre = loop.train(settings(text, model={'scheme': 'pre'}), tmp_path / 'pre')
  compared = runs.compare([tmp_path / 'pre', workdir])
  assert compared['runs'][1]['difference'] == pytest.approx(result['loss'] - pre['loss'])
  assert compared['groups'] == [{'settings': {'model.scheme': 'lns'}, 'pairs': 1, 'interval': None,
                                 'mean_difference': pytest.approx(result['loss'] - pre['loss'])}]
  assert 'model.scheme' in runs.table(compared)
  backwards = runs.compare([workdir, tmp_path / 'pre'])
  assert backwards['groups'][0]['mean_difference'] == pytest.approx(pre['loss'] - result['loss'])
  loop.train(settings(text, data={'seq_len': 16}), tmp_path / 'other')
  with pytest.raises(UserError, match='different corpora'):
    runs.compare([workdir, tmp_path / 'other'])
  assert len(runs.compare([workdir, tmp_path / 'other'], allow_different_corpora=True)['runs']) == 2


def test_evaluations_of_different_size_are_not_compared(text, tmp_path):
  loop.train(settings(text), tmp_path / 'a')
  loop.train(settings(text, eval={'max_tokens': 512}), tmp_path / 'b')
  with pytest.raises(UserError, match='tokens and .* the same --config.eval.max_tokens'):
    runs.compare([tmp_path / 'a', tmp_path / 'b'])


def test_settings_survive_the_checkpoint(finished, text):
  from lns_jax.interop.load import load_run_config
  assert to_dict(load_run_config(finished[0])[1]) == to_dict(loop.resolved(settings(text)))
  with pytest.raises(UserError, match="'lns', not 'pre'"):
    lns_jax.load(finished[0], scheme='pre')
  assert dataclasses.is_dataclass(lns_jax.load(finished[0], step=4)[0])


def test_a_run_from_before_a_setting_existed_has_its_default(text):
  asked = to_dict(settings(text))
  saved = to_dict(settings(text))
  for name in ('family', 'ramp_step', 'mix_count', 'head_dim', 'norm'):
    del saved['model'][name]
  assert not resume.differences(saved, asked)
  saved['model']['scheme'] = 'pre'
  assert set(resume.differences(saved, asked)) == {'model.scheme'}
  assert set(resume.differences({**saved, 'unknown': 1}, asked)) >= {'model.scheme', 'unknown'}
