"""Runs that start from the weights of another: what they start from, and what is refused."""

import json

import jax
import numpy as np
import pytest

import lns_jax
from lns_jax import surgery
from lns_jax.errors import UserError
from lns_jax.models import layout
from lns_jax.train import log, loop
from interop.test_save import run_folder
from tiny import model
from train.test_loop import final, interrupted, same, settings, text  # noqa: F401: a fixture

# One update, of rate 0.
ONE = {'optimizer': {'lr': 1e-2, 'warmup_steps': 1}, 'train': {'steps': 1, 'layer_stats_every': 0}}


@pytest.fixture(scope='module')
def pruned(text, tmp_path_factory):  # noqa: F811
  folder = tmp_path_factory.mktemp('start')
  loop.train(settings(text, train={'layer_stats_every': 0}), folder / 'run')
  surgery.prune(folder / 'run', folder / 'less', drop_layers=[2])
  return folder / 'less'


def starting(text, pruned, **groups):  # noqa: F811
  groups['train'] = {'init_from': str(pruned), **groups.get('train', {})}
  return settings(text, **groups)


@pytest.mark.parametrize('loop_kind', ['scan', pytest.param('unrolled', marks=pytest.mark.slow)])
def test_a_run_starts_from_the_weights_and_layers_of_another(loop_kind, text, pruned, tmp_path):  # noqa: F811
  """Asked for are all three layers; the first update has rate 0."""
  loop.train(starting(text, pruned, model={'loop': loop_kind}, **ONE), tmp_path)
  config, params, _ = lns_jax.load(tmp_path)
  assert config.layer_ids == (1, 3) and config.depth == 3
  same(layout.unstack(params), final(pruned))


@pytest.mark.slow
def test_training_goes_on_from_there_and_is_taken_up_again(text, pruned, tmp_path, monkeypatch):  # noqa: F811
  config = starting(text, pruned, train={'steps': 6})
  healed = loop.train(config, tmp_path / 'whole')
  before = json.loads((pruned / 'result.json').read_text())
  assert healed['loss'] < before['loss'] and healed['step'] == 6
  records = [r for r in log.read(tmp_path / 'whole' / 'metrics.jsonl') if 'loss' in r]
  assert [r['step'] for r in records][0] == 1 and records[0]['lr'] == 0
  interrupted(config, tmp_path / 'killed', 3, monkeypatch)
  loop.train(config, tmp_path / 'killed')
  same(final(tmp_path / 'killed'), final(tmp_path / 'whole'))


@pytest.mark.slow
def test_parameters_take_the_type_of_the_run(text, pruned, tmp_path):  # noqa: F811
  loop.train(starting(text, pruned, model={'precision': 'paper_bf16'}, **ONE), tmp_path)
  assert {str(x.dtype) for x in jax.tree.leaves(lns_jax.load(tmp_path)[1])} == {'bfloat16'}


@pytest.mark.parametrize('groups, words', [
    ({'model': {'scheme': 'pre'}}, r"model.scheme = 'lns', but 'pre' was asked for; set --config.model.scheme=lns"),
    ({'model': {'d_model': 32}}, 'model.d_model = 16, but 32'),
    ({'model': {'num_layers': 5}}, 'model.depth = 3, but 5|layer_ids'),
    ({'model': {'num_layers': 2, 'layer_ids': [1, 2], 'depth': 3}}, r'model.layer_ids = \(1, 3\), but \(1, 2\)'),
    ({'data': {'tokenizer': 'bpe'}}, 'another tokenizer'),
    ({'train': {'init_from': '/nowhere'}}, "init_from = '/nowhere' is not a run folder"),
])
def test_what_does_not_fit_is_refused_before_anything_is_trained(groups, words, text, pruned, tmp_path):  # noqa: F811
  with pytest.raises(UserError, match=words):
    loop.train(starting(text, pruned, **groups), tmp_path / 'run')
  assert not (tmp_path / 'run' / 'checkpoints').exists()


def test_a_ramp_does_not_start_twice(text, tmp_path):  # noqa: F811
  run_folder(tmp_path / 'run', model(scheme='prores'))
  with pytest.raises(UserError, match='prores, whose branches grow from 0'):
    loop.train(starting(text, tmp_path / 'run', model={'scheme': 'prores'}), tmp_path / 'again')


def test_a_pruned_folder_is_not_a_run_to_go_on_with(text, pruned):  # noqa: F811
  files = sorted(p for p in pruned.rglob('*') if p.name != '.lock')
  for model in ({}, {'num_layers': 2, 'layer_ids': [1, 3], 'depth': 3}):
    with pytest.raises(UserError, match='without the state of an optimizer.*--config.train.init_from='):
      loop.train(settings(text, model=model), pruned)
  assert sorted(p for p in pruned.rglob('*') if p.name != '.lock') == files
