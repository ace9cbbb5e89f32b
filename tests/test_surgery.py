"""Pruning a run: what is measured, what is left on disk, what every command makes of it, what is refused."""

import dataclasses
import json

import numpy as np
import pytest

import lns_jax
from lns_jax import diagnose, runs, surgery
from lns_jax.data import sample
from lns_jax.errors import UserError
from lns_jax.train import loop, run_info
from test_cli import command
from train import test_vision
from train.test_loop import settings, text  # noqa: F401: a fixture

PRUNE = 'experiments/prune.py'


@pytest.fixture(scope='module')
def run(text, tmp_path_factory):  # noqa: F811
  workdir = tmp_path_factory.mktemp('surgery') / 'run'
  loop.train(settings(text, model={'num_layers': 4}, train={'layer_stats_every': 0}), workdir)
  return workdir


@pytest.fixture(scope='module')
def pruned(run, tmp_path_factory):
  out = tmp_path_factory.mktemp('pruned') / 'without_2'
  return out, surgery.prune(run, out, drop_layers=[2, 2])  # named twice, it goes once


def test_the_loss_without_a_layer_is_the_baseline_and_what_its_removal_costs(run, pruned):
  """On the same rows: the split as the run evaluates it, 2048 tokens of it."""
  dataset = runs.open_dataset(run, settings_of(run))
  rows = [dataset.row('validation', i) for i in range(dataset.rows_within('validation', 2048))]
  batch = {k: np.stack([row[k] for row in rows]) for k in rows[0]}
  config, params, _ = lns_jax.load(run)
  found = lns_jax.depth.layer_drop(config, params, [batch])
  out, told = pruned
  expected = found['baseline'].value + found['layer_drop'].value[1]
  evaluated = runs.evaluate(out)
  assert evaluated['tokens'] == found['baseline'].tokens and evaluated['step'] == 6
  assert evaluated['loss'] == pytest.approx(expected, rel=1e-6)
  assert told['after'] == {k: evaluated[k] for k in told['after']}
  assert told['before']['loss'] == pytest.approx(runs.evaluate(run)['loss'], rel=1e-7)
  assert told['rise'] == pytest.approx(found['layer_drop'].value[1], abs=1e-5)
  assert told['relative_rise'] == pytest.approx(told['rise'] / told['before']['loss'])
  assert (told['removed_layers'], told['layer_ids'], told['sample']) == ([2], [1, 3, 4], None)


def settings_of(workdir):
  from lns_jax.interop.load import load_run_config
  return load_run_config(workdir)[1]


def test_the_pruned_folder_is_compared_with_its_run_and_diagnosed(run, pruned, tmp_path):
  out, told = pruned
  compared = runs.compare([run, out])['runs']
  assert compared[1]['difference'] == pytest.approx(told['rise'], abs=1e-6)
  assert compared[1]['settings'] == {'model.num_layers': 3, 'model.layer_ids': [1, 3, 4]}
  diagnose.diagnose([str(out)], tmp_path / 'depth', tokens=512, chosen=('layer_drop',))
  found = json.loads((tmp_path / 'depth' / 'depth.json').read_text())
  assert found['layer_ids'] == [1, 3, 4] and len(found['layer_drop']) == 3


def test_a_run_is_compared_by_settings_that_it_is_from_before(run, pruned, tmp_path):
  old = tmp_path / 'old'
  old.mkdir()
  for name in ('run_info.json', 'result.json'):
    found = json.loads((run / name).read_text())
    del found['config']['model']['family'], found['config']['train']['init_from']
    (old / name).write_text(json.dumps(found))
  assert set(runs.compare([old, pruned[0]])['runs'][1]['settings']) == {'model.num_layers', 'model.layer_ids'}


def test_layers_go_as_long_as_the_loss_rises_by_less(run, tmp_path):
  """The order and the rises are those of `depth.prune` on the sample, whatever comes after the last that may go."""
  dataset = runs.open_dataset(run, settings_of(run))
  rows = sample.drawn(dataset, 'validation', 512)
  config, params, _ = lns_jax.load(run)
  whole = lns_jax.depth.prune(config, params, [{k: np.stack([row[k] for row in rows]) for k in rows[0]}])
  rises = whole.rise.value / whole.baseline.value
  limit = float(np.mean(np.maximum.accumulate(rises)[1:]))  # lies between what two and what three removals cost
  n = int(np.cumprod(rises < limit).sum())
  assert 1 <= n < 3
  told = surgery.prune(run, tmp_path / 'less', most_rise=limit, tokens=512)
  assert told['removed_layers'] == list(whole.order[:n])
  assert told['sample'] == {'tokens': whole.baseline.tokens, 'relative_rise': pytest.approx(rises[n - 1], abs=1e-6)}
  assert lns_jax.load(tmp_path / 'less')[0].layer_ids == tuple(sorted(set(range(1, 5)) - set(whole.order[:n])))
  assert run_info.read(tmp_path / 'less')['origin']['removed_layers'] == sorted(whole.order[:n])


def test_when_no_layer_may_go_nothing_is_written(run, tmp_path):
  """At -1 not even one that the loss falls without."""
  with pytest.raises(UserError, match=r'no layer can go at less than -1 of the loss: the cheapest, \d, costs'):
    surgery.prune(run, tmp_path / 'less', most_rise=-1.0, tokens=512)
  assert list(tmp_path.iterdir()) == []


def test_greedy_pruning_stops_with_the_removal_that_costs_too_much(run):
  dataset = runs.open_dataset(run, settings_of(run))
  batch = {k: v[None] for k, v in dataset.row('validation', 0).items()}
  config, params, _ = lns_jax.load(run)
  whole = lns_jax.depth.prune(config, params, [batch])
  rises = whole.rise.value / whole.baseline.value
  for last in range(3):
    if rises[last] > max(rises[:last], default=-np.inf):
      # A hair below what it costs: the rise is a product again inside, which may round to either side.
      found = lns_jax.depth.prune(config, params, [batch], stop_at=float(np.nextafter(rises[last], -np.inf)))
      assert found.order == whole.order[:last + 1]


@pytest.mark.slow
def test_a_model_of_images_is_pruned_by_images(tmp_path):
  config = test_vision.config()
  loop.train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2, layer_stats_every=0)),
             tmp_path / 'run')
  told = surgery.prune(tmp_path / 'run', tmp_path / 'less', most_rise=10.0, tokens=20)
  assert told['sample']['images'] == 20 and len(told['removed_layers']) == 2 and told['after']['images'] == 359
  assert runs.evaluate(tmp_path / 'less')['accuracy'] == told['after']['accuracy']


@pytest.mark.parametrize('choice, words', [
    ({}, '--drop_layers.*--most_rise'),
    ({'drop_layers': [2], 'most_rise': 0.01}, 'one of --drop_layers.*--most_rise'),
    ({'most_rise': float('nan')}, '--most_rise is not a number'),
    ({'drop_layers': [2, 9]}, 'no layer 9; its layers are 1-4'),
    ({'drop_layers': [1, 2, 3, 4]}, 'every layer'),
])
def test_a_mistake_writes_nothing_and_reads_no_text(choice, words, run, tmp_path, monkeypatch):
  monkeypatch.setattr(runs, 'open_dataset', lambda *_: pytest.fail('too late'))
  with pytest.raises(UserError, match=words):
    surgery.prune(run, tmp_path / 'less', **choice)
  assert list(tmp_path.iterdir()) == []


def test_an_out_that_exists_and_a_model_that_does_not_are_refused(run, tmp_path):
  (tmp_path / 'there').mkdir()
  with pytest.raises(UserError, match='there exists'):
    surgery.prune(run, tmp_path / 'there', drop_layers=[2])
  with pytest.raises(UserError, match='not a run folder'):
    surgery.prune(tmp_path, tmp_path / 'less', drop_layers=[2])
  assert not (tmp_path / 'less').exists()


@pytest.mark.parametrize('argument, words', [
    ('--drop_layers=2,x', ["'x'", 'not a whole number']), ('--most_rise=-1', ['most_rise']),
    ('--most_rise=nan', ['most_rise']), ('--drop_layers=2,9', ['no layer 9', '1-4'])])
def test_a_mistake_on_the_command_line_is_one_sentence(argument, words, run, tmp_path):
  found = command(PRUNE, f'--model={run}', f'--out={tmp_path / "less"}', argument)
  assert found.returncode == 1 and not found.stdout and list(tmp_path.iterdir()) == []
  line, = found.stderr.strip().splitlines()
  assert line.startswith('error: ') and all(word in line for word in words), line


@pytest.mark.slow
def test_the_last_line_of_the_command_is_what_it_found(run, pruned, tmp_path):
  found = command(PRUNE, f'--model={run}', '--drop_layers=2', f'--out={tmp_path / "less"}', timeout=120)
  told = json.loads(found.stdout.splitlines()[-1])
  assert found.returncode == 0 and 'evaluating' in found.stderr
  assert told['after']['loss'] == pytest.approx(pruned[1]['after']['loss'], rel=1e-6)
