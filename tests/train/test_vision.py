"""A run on images: the same loop, resume and evaluation as on text."""

import dataclasses
import json

import numpy as np
import pytest

import lns_jax
from lns_jax import presets, runs
from lns_jax.data import images
from lns_jax.errors import UserError
from lns_jax.train import log, loop
from train.test_loop import final, interrupted, same


def config(**model):
  base = presets.load_config('vit_tiny:digits')
  small = dict(d_model=16, d_ff=32, num_layers=3, num_heads=2, scheme='branch_lns', loop='scan')
  return dataclasses.replace(
      base, model=dataclasses.replace(base.model, head_dim=0, num_kv_heads=0, layer_ids=(), depth=0, **small | model),
      train=dataclasses.replace(
          base.train, steps=6, batch_size=32, log_every=1, layer_stats_every=3, tensorboard=False),
      optimizer=dataclasses.replace(base.optimizer, warmup_steps=2, lr=1e-2),
      eval=dataclasses.replace(base.eval, every=0), checkpoint=dataclasses.replace(base.checkpoint, every=2, keep=3))


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('vit') / 'run'
  return workdir, loop.train(config(), workdir)


def test_loss_and_accuracy_are_those_of_every_image_once(finished):
  workdir, result = finished
  model, params, tokenizer = lns_jax.load(workdir)
  data = images.open(config().data, model)
  rows = [data.row('validation', i) for i in range(data.num_rows('validation'))]
  logits = np.asarray(lns_jax.forward(model, params, np.stack([r['images'] for r in rows])), np.float64)
  labels = np.array([r['labels'] for r in rows])
  losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]
  assert tokenizer is None and result['images'] == 359
  assert result['loss'] == pytest.approx(losses.mean(), rel=1e-5)
  assert result['accuracy'] == pytest.approx(np.mean(logits.argmax(-1) == labels), abs=1e-9)
  assert runs.evaluate(workdir)['accuracy'] == result['accuracy']


def test_a_run_on_images_speaks_of_images(finished):
  workdir, result = finished
  assert result['train_images'] == 6 * 32 and result['images_per_second'] > 0
  assert not {'train_tokens', 'tokens_per_second', 'paper_loss', 'perplexity'} & set(result)
  assert 'tokens' not in log.read(workdir / 'metrics.jsonl')[0]
  with pytest.raises(UserError, match='a model of images; --parity'):
    runs.evaluate(workdir, parity=True)


def test_statistics_are_per_token_of_the_image(finished):
  workdir, _ = finished
  records = [r for r in log.read(workdir / 'metrics.jsonl') if 'variance' in r]
  first, model = records[0], config().model
  data = images.open(config().data, model)
  batch = next(iter(data.train_batches(0, 32, num_steps=1)))
  import jax
  states = lns_jax.states(model, lns_jax.init(model, jax.random.key(0)), batch['images'])
  expected = np.var(np.asarray(states, np.float64), axis=-1).mean(axis=(1, 2))
  np.testing.assert_allclose(first['variance'], expected, rtol=1e-4)


def test_going_on_equals_never_stopped_bit_for_bit(finished, tmp_path, monkeypatch):
  interrupted(config(), tmp_path, 3, monkeypatch)
  loop.train(config(), tmp_path)
  same(final(tmp_path), final(finished[0]))


def test_runs_on_images_are_compared_by_loss(finished, tmp_path):
  loop.train(config(scheme='pre'), tmp_path)
  compared = runs.compare([tmp_path, finished[0]])
  assert compared['runs'][1]['difference'] is not None and 'accuracy' in runs.table(compared)


def test_text_and_images_are_not_compared_and_damage_is_named(finished, tmp_path):
  info = json.loads((finished[0] / 'run_info.json').read_text())
  for name, result in (('text', {'loss': 3.0, 'perplexity': 20.1, 'tokens': 359}), ('empty', {})):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'run_info.json').write_text(json.dumps(info))
    (tmp_path / name / 'result.json').write_text(json.dumps(result))
  for pair in ((finished[0], tmp_path / 'text'), (tmp_path / 'text', finished[0])):
    with pytest.raises(UserError, match='one is a model of text and one of images'):
      runs.compare(pair, allow_different_corpora=True)
  with pytest.raises(UserError, match='result.json has no loss; run the training command'):
    runs.compare([finished[0], tmp_path / 'empty'])
  (tmp_path / 'text' / 'run_info.json').write_text('{"config": ')
  for ask in (runs.evaluate, lambda w: runs.compare([w])):
    with pytest.raises(UserError, match='json is not JSON.*; run the training command of|not a run folder'):
      ask(tmp_path / 'text')


def test_images_are_not_bounded_by_tokens(finished):
  with pytest.raises(UserError, match='--max_tokens does not bound'):
    runs.evaluate(finished[0], max_tokens=5)
