"""Evaluation: every token once, whatever the batch and the devices."""

import math

import jax
import numpy as np
import pytest

from lns_jax import sharding
from lns_jax.config import MeshConfig
from lns_jax.train import evaluate
from lns_jax.models import transformer
from models import test_vit
from tiny import batch, model, params


def test_by_hand():
  """Known fault V1: losses 2, 2, 2, 2, 5 of one token each are 2.6, not the 3.5 of two batch means."""
  found = evaluate.summary({'loss': 13.0, 'weight': 5.0, 'bytes': 10.0}, [2.0, 5.0])
  assert found['loss'] == pytest.approx(2.6) and found['perplexity'] == pytest.approx(13.4637, rel=1e-5)
  assert found['tokens'] == 5 and found['paper_loss'] == pytest.approx(7 / 3)


def test_bits_per_byte_by_hand():
  """Known fault V4: a uniform guess of 32000 over 4 tokens that stand for 10 bytes."""
  found = evaluate.summary({'loss': 4 * math.log(32000), 'weight': 4.0, 'bytes': 10.0}, [math.log(32000)])
  assert found['bits_per_byte'] == pytest.approx(5.986314, rel=1e-6)


def test_an_overflowing_perplexity_is_infinite_not_an_error():
  assert evaluate.summary({'loss': 4000.0, 'weight': 4.0, 'bytes': 10.0}, [1000.0])['perplexity'] == math.inf


def test_accuracy_by_hand():
  found = evaluate.summary({'loss': 6.0, 'weight': 8.0, 'correct': 6.0}, [0.75])
  assert found == {'loss': 0.75, 'accuracy': 0.75, 'images': 8}


class Rows:
  """Five ragged rows as a dataset with one split."""

  def __init__(self):
    self.rows = batch(5, 16)
    self.rows['bytes'] = self.rows['targets'] % 5

  def rows_within(self, split, max_tokens):
    return 5

  def eval_batches(self, split, size, *, max_tokens=0, rows=None):
    for start in range(0, 5, size):
      yield {k: np.pad(v[start:start + size], ((0, max(0, start + size - 5)), (0, 0))) for k, v in self.rows.items()}


@pytest.mark.parametrize('devices', [1, 4])
def test_any_batch_and_any_devices_give_the_same_numbers(devices):
  config, data = model(scheme='lns'), Rows()
  p = params(config)
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
  where = jax.tree.map(lambda _: sharding.replicated(mesh), p)
  step = evaluate.make_eval_step(config, mesh, where)
  def counted(batches, total):
    batches = list(batches)
    assert len(batches) == total  # which a bar shows
    return batches
  found = [evaluate.evaluate(step, jax.device_put(p, where), data, mesh, rows=evaluate.batch_size(mesh, rows),
                             progress=counted) for rows in (1, 2, 3, 5, 8)]
  real = data.rows['segment_ids'] > 0
  for f in found:
    assert f['tokens'] == real.sum() and f['bytes'] == data.rows['bytes'][real].sum()
    assert f['loss'] == pytest.approx(found[0]['loss'], rel=1e-6)
  logits = transformer.forward(config, p, data.rows['tokens'], segment_ids=data.rows['segment_ids'])
  logits = np.asarray(logits, np.float64)
  losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, data.rows['targets'][..., None], -1)[..., 0]
  assert found[0]['loss'] == pytest.approx(losses[real].mean(), rel=1e-5)


def test_rows_are_rounded_up_to_the_devices():
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:4])
  assert [evaluate.batch_size(mesh, n) for n in (1, 4, 5)] == [4, 4, 8]


@pytest.mark.parametrize('family', ['decoder', 'vit'])
def test_sums_by_row_are_those_of_a_batch_of_the_row_alone(family):
  if family == 'vit':
    config, names = test_vit.model(), ('loss', 'weight', 'correct')
    p, rows = test_vit.params(config), test_vit.batch(config, rows=4)
  else:
    config, names = model(scheme='lns'), ('loss', 'weight', 'bytes')
    p, rows = params(config), Rows().rows
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  where = jax.tree.map(lambda _: sharding.replicated(mesh), p)
  whole, by_row = (evaluate.make_eval_step(config, mesh, where, by_row=b) for b in (False, True))
  found = by_row(p, rows, None)
  assert set(found) == set(names)
  for i in range(len(rows['segment_ids' if family == 'decoder' else 'labels'])):
    alone = whole(p, {k: v[i:i + 1] for k, v in rows.items()}, None)
    for name in names:
      assert found[name][i] == pytest.approx(float(alone[name]), rel=1e-5), name
