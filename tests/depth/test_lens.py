"""The logit lens against a naive float64 computation, and what must hold at its end."""

import functools

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import lns_jax
from lns_jax.config import ModelConfig
from lns_jax.depth import effective
from lns_jax.depth.lens import logit_lens
from lns_jax.errors import UserError
from lns_jax.models import loss, transformer
from tiny import batch, model, params, rebuilt

STATES = jax.jit(lns_jax.states, static_argnums=0)
FORWARD = jax.jit(lns_jax.forward, static_argnums=0)
HEAD = jax.jit(transformer.head, static_argnums=0)
SMALL = dict(vocab_size=40, d_model=16, d_ff=32, num_heads=2, num_kv_heads=1, num_layers=3)
VIT = ModelConfig(family='vit', causal=False, norm='layernorm', bias='all', mlp='gelu', image_size=4, patch_size=2,
                  channels=1, num_classes=4, d_model=16, d_ff=32, num_layers=2, num_heads=2, init_std=0.2)


def naive(states_logits, labels, w):
  """From logits [L + 1, N, V] in float64: loss, KL(final || lens), KL(lens || final), overlap, each [L + 1]."""
  logs = log_softmax(np.asarray(states_logits, np.float64), axis=-1)
  final = logs[-1]
  K = min(5, logs.shape[-1])
  def shared(row, last):
    return len(set(np.argsort(-row)[:K]) & set(np.argsort(-last)[:K])) / K
  mean = lambda values: np.sum(values * w, axis=-1) / np.sum(w)
  return {'lens_loss': mean(-logs[:, np.arange(len(w)), labels]),
          'lens_kl': mean(np.sum(np.exp(final) * (final - logs), axis=-1)),
          'lens_reverse_kl': mean(np.sum(np.exp(logs) * (logs - final), axis=-1)),
          'lens_overlap': mean(np.array([[shared(r, f) for r, f in zip(rows, final)] for rows in logs]))}


def of_text(config, p, batches):
  """The naive numbers of batches; their targets' weights: as given, or 1 on real tokens."""
  logits, targets, w = [], [], []
  for b in batches:
    states = STATES(config, p, b['tokens'], segment_ids=b['segment_ids'])
    logits.append(np.stack([HEAD(config, p, s).reshape(-1, config.vocab_size) for s in states]))
    targets.append(b['targets'].ravel())
    w.append(b.get('weights', b['segment_ids'] > 0).ravel())
  return naive(np.concatenate(logits, axis=1), np.concatenate(targets), np.concatenate(w))


@pytest.mark.parametrize('changes', [
    dict(loop='scan', scheme='mix', mix_fraction=0.5, tie_embeddings=True),
    dict(scheme='lns', layer_ids=(1, 4, 5), depth=6)], ids=str)
def test_the_curves_are_those_of_every_state_through_the_head(changes):
  config = rebuilt(model(**SMALL), **changes)
  p, batches = params(config), [batch(vocab=40), batch(vocab=40, seed=1)]
  found = logit_lens(config, p, batches)
  for name, right in of_text(config, p, batches).items():
    np.testing.assert_allclose(found[name].value, right, rtol=2e-5, atol=2e-6, err_msg=name)
    assert found[name].tokens == sum((b['segment_ids'] > 0).sum() for b in batches)
  overlap, kl = effective.by_overlap(found['lens_overlap'].value), effective.by_kl(found['lens_reverse_kl'].value)
  np.testing.assert_array_equal(found['effective_depth_overlap'].value, overlap)
  np.testing.assert_array_equal(found['effective_ratio_kl'].value, kl / config.num_layers)


def test_weights_say_which_targets_count_and_unweighed_ones_are_not_read():
  config, b = model(**SMALL), batch(vocab=40)
  p = params(config)
  w = np.random.default_rng(0).integers(0, 3, b['tokens'].shape).astype(np.float32)
  right = of_text(config, p, [b | {'weights': w}])
  found = logit_lens(config, p, [b | {'weights': w, 'targets': np.where(w > 0, b['targets'], -100)}])
  for name in right:
    np.testing.assert_allclose(found[name].value, right[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize('pooling', ['cls', 'mean'])
def test_classes_of_images_of_which_there_are_less_than_five(pooling):
  config = rebuilt(VIT, pooling=pooling)
  rng = np.random.default_rng(0)
  b = {'images': rng.standard_normal((6, 4, 4, 1)).astype(np.float32), 'labels': rng.integers(0, 4, 6),
       'weights': np.float32([1, 1, 0, 1, 1, 0])}
  p = transformer.init(config, jax.random.key(0))
  logits = np.stack([HEAD(config, p, s) for s in STATES(config, p, b['images'])])
  found = logit_lens(config, p, [b])
  for name, right in naive(logits, b['labels'], b['weights']).items():
    np.testing.assert_allclose(found[name].value, right, rtol=2e-5, atol=2e-6, err_msg=name)
  assert found['lens_loss'].tokens == 4 and (found['lens_overlap'].value == 1).all()


@pytest.mark.parametrize('precision, close', [('float32', 1e-6), ('bfloat16', 1e-3)])
def test_the_last_state_predicts_what_the_model_does(precision, close):
  config, b = model(**SMALL, precision=precision, loop='scan'), batch(vocab=40)
  p = params(config)
  found = logit_lens(config, p, [b])
  w = loss.weights(b)
  right = loss.token_losses(FORWARD(config, p, b['tokens'], segment_ids=b['segment_ids']), b['targets'], w)
  assert found['lens_loss'].value[-1] == pytest.approx(float(right.sum() / w.sum()), rel=close)
  assert abs(found['lens_kl'].value[-1]) < close and abs(found['lens_reverse_kl'].value[-1]) < close
  assert found['lens_overlap'].value[-1] > 1 - close and (found['lens_kl'].value[:-1] > 10 * close).all()
  assert (found['lens_kl'].low <= found['lens_kl'].value).all()


def test_a_layer_that_does_nothing_changes_no_prediction():
  config = model(**SMALL)
  p = params(config)
  p['layers']['2']['attn']['o'] *= 0
  p['layers']['2']['mlp']['down'] *= 0
  found = logit_lens(config, p, [batch(vocab=40)])
  for name in ('lens_loss', 'lens_kl', 'lens_overlap'):
    assert found[name].value[2] == found[name].value[1]


@functools.cache
def broken(layer):
  config = model(**SMALL)
  p = params(config)
  p['layers'][layer]['mlp']['down'] = p['layers'][layer]['mlp']['down'].at[0, 0].set(np.inf)
  return config, p


def test_what_is_not_finite_is_named():
  b, other = batch(vocab=40), batch(vocab=40, seed=1)
  with pytest.raises(UserError, match='the weight layers/2/mlp/down is not finite'):
    logit_lens(*broken('2'), [b])
  other['targets'][2, 0] = 40
  config = model(**SMALL)
  with pytest.raises(UserError, match='loss of sequence 6 is not finite.*targets'):
    logit_lens(config, params(config), [b, other])


def test_no_batches_and_no_targets_are_errors():
  config = model(**SMALL)
  with pytest.raises(UserError, match='no batches'):
    logit_lens(config, params(config), [])
  b = batch(vocab=40)
  del b['targets']
  with pytest.raises(UserError, match="reads 'targets'.*batch has.*'tokens'"):
    logit_lens(config, params(config), [b])
