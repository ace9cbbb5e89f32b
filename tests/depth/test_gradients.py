"""Gradients by layer against gradients of a loop of blocks by hand, sequence by sequence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax import config as config_lib
from lns_jax.depth import gradients as measure
from lns_jax.depth.gradients import _passes, stable_rank, thirds
from lns_jax.errors import UserError
from lns_jax.layers import attention, block
from lns_jax.models import by_layer, layout, loss, transformer
from tiny import batch, model, params


def small(**changes):
  return model(**dict(d_model=16, d_ff=32, vocab_size=32, num_layers=3, scheme='lns', loop='scan') | changes)


def text(rows=4):
  return batch(rows, 12, vocab=32)


def mean_loss(config, p, b, added=None):
  """Over all tokens of a batch; added: [L + 1, B, T, D] onto the states."""
  x = transformer.enter(config, p, b['tokens'])[0] + (0 if added is None else added[0])
  ctx = attention.context(config, x, b['segment_ids'])
  for i, l in enumerate(config.layer_ids):
    x = block.Block(config).apply({'params': p['layers'][str(l)]}, x, ctx, l)[0]
    x = x if added is None else x + added[i + 1]
  w = loss.weights(b)
  return jnp.sum(loss.token_losses(transformer.head(config, p, x), b['targets'], w)) / jnp.sum(w)


def by_hand(config, p, b):
  """(gradients of each row's mean loss by its parameters, by its states, weights of the rows)."""
  grad = jax.jit(jax.grad(lambda p, row, added: mean_loss(config, p, row, added), argnums=(0, 2)))
  zero = jnp.zeros((config.num_layers + 1, 1, b['tokens'].shape[1], config.d_model))
  rows = [jax.device_get(grad(p, {k: v[r:r + 1] for k, v in b.items()}, zero)) for r in range(len(b['tokens']))]
  return [g for g, _ in rows], [s for _, s in rows], np.sum(b['segment_ids'] > 0, axis=1)


def flat(tree, prefix):
  """{path: leaf} of one layer's parameters, in float64."""
  return {path: np.asarray(x, np.float64) for path, x in by_layer.leaves(tree) if path.startswith(prefix)}


def ranks(g):
  """Stable ranks of the matrices among a sub-layer's gradients, of those that are not zero, averaged."""
  found = []
  for path, x in g.items():
    if x.ndim > 1 and x.any():
      x = x.reshape(-1, x.shape[-1]) if path == 'attn/o' else x.reshape(len(x), -1)
      found.append(np.sum(x ** 2) / np.linalg.norm(x, 2) ** 2)
  return np.mean(found)


@pytest.mark.parametrize('settings', [
    dict(scheme='lns'), dict(scheme='mix', num_layers=2, mix_fraction=0.5, bias='all', loop='unrolled'),
    pytest.param(dict(scheme='gpas', removed=2), marks=pytest.mark.slow)], ids=lambda s: s['scheme'])
def test_every_measure_is_that_of_each_sequences_gradient(settings):
  settings = dict(settings)
  removed = settings.pop('removed', None)
  config, b = small(**settings), text()
  p = layout.unstack(params(config))
  p['layers']['1']['attn']['o'] *= 0  # q, k and v of this layer have no gradient
  if removed:
    config, p = lns_jax.remove_layers(config, p, [removed])
    p = layout.unstack(p)
  found = measure(config, layout.native(p, config), [b])
  grads, states, w = by_hand(config, p, b)
  average = lambda values: np.average(values, axis=0, weights=w)
  def close(name, values, rtol=2e-4):
    np.testing.assert_allclose(found[name].value, average(values), rtol, err_msg=name)
  close('state_grad_norm', [[np.linalg.norm(x) for x in s] for s in states])
  for name, prefix in (('', ''), ('attn_', 'attn'), ('mlp_', 'mlp')):
    of = [[flat(g['layers'][str(l)], prefix) for l in config.layer_ids] for g in grads]
    weights = [flat(p['layers'][str(l)], prefix) for l in config.layer_ids]
    close(f'{name}grad_norm', [[np.sqrt(sum(np.sum(x ** 2) for x in g.values())) for g in row] for row in of])
    dots = [[sum(np.sum(x * t[path]) for path, x in g.items()) for g, t in zip(row, weights)] for row in of]
    close(f'{name}taylor', np.abs(dots))
    np.testing.assert_allclose(found[f'{name}theta_grad'].value, average(dots), rtol=1e-3, atol=1e-5)
    if prefix:
      close(f'{name}stable_rank', [[ranks(g) for g in row] for row in of], 1e-2)
  for e in found.values():
    assert np.isnan(e.value).all() or ((e.low <= e.value) & (e.value <= e.high)).all()


def test_theta_grad_is_the_derivative_of_the_loss_over_all_tokens_whatever_the_batches():
  config, b = small(scheme='pre'), text()
  p = layout.unstack(params(config))
  def scaled(factors):  # a common factor on all parameters of a layer
    return p | {'layers': {l: jax.tree.map(lambda x: f * x, p['layers'][l]) for l, f in zip('123', factors)}}
  expected = jax.jit(jax.grad(lambda factors: mean_loss(config, scaled(factors), b)))(jnp.ones(3))
  halves = [{k: v[part] for k, v in b.items()} for part in (slice(0, 2), slice(2, 4))]
  before = _passes._cache_size()
  found = measure(config, p, halves)
  np.testing.assert_allclose(found['theta_grad'].value, expected, rtol=1e-3, atol=1e-5)
  assert _passes._cache_size() == before + 1  # one program for both batches
  np.testing.assert_allclose(found['taylor_thirds'].value, found['taylor'].value / found['taylor'].value.sum())


def test_padding_counts_for_nothing():
  config, b = small(), text()
  p, empty = params(config), {k: np.zeros_like(v) for k, v in b.items()}
  alone = measure(config, p, [b])
  beside = measure(config, p, [{k: np.concatenate([v, empty[k]]) for k, v in b.items()}])
  for name in alone:
    np.testing.assert_allclose(beside[name].value, alone[name].value, rtol=1e-4, atol=1e-6)
  with pytest.raises(UserError, match='every target is masked'):
    measure(config, p, [empty])
  with pytest.raises(UserError, match='no batches'):
    measure(config, p, [])


def test_what_is_not_finite_is_named():
  config, b = small(), text()
  p = params(config)
  bad = b | {'targets': np.where(np.arange(4)[:, None] == 1, 99, b['targets'])}
  with pytest.raises(UserError, match='the loss is not finite at sequence 5'):
    measure(config, p, [b, bad])
  mlp = p['layers']['1-3']['mlp']
  mlp['up'] = mlp['up'].at[1, 0, 0].set(jnp.nan)
  with pytest.raises(UserError, match='the weight layers/2/mlp/up is not finite'):
    measure(config, p, [b])
  # Weights, states and loss are finite, the square of a gradient is not.
  mlp = (p := params(config))['layers']['1-3']['mlp']
  mlp['down'], mlp['up'] = mlp['down'].at[1:].set(0), mlp['up'].at[1:].mul(1e25)
  with pytest.raises(UserError, match='the gradient of layers/3/mlp/down is not finite at sequence 0'):
    measure(config, p, [b])


@pytest.mark.slow
def test_bfloat16_parameters_give_nearly_the_same():
  config, b = small(), text()
  p = params(config)
  full = measure(config, p, [b])
  half = measure(dataclasses.replace(config, precision='paper_bf16'),
                 jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), [b])
  for name in ('grad_norm', 'state_grad_norm', 'mlp_stable_rank'):
    np.testing.assert_allclose(half[name].value, full[name].value, rtol=0.05)


@pytest.mark.slow
def test_a_model_of_images_has_gradients_too():
  config = config_lib.ModelConfig(family='vit', causal=False, norm='layernorm', bias='all', mlp='gelu', image_size=4,
                                  patch_size=2, channels=1, num_classes=5, d_model=16, d_ff=32, num_layers=2,
                                  num_heads=2, init_std=0.2, precision='float32')
  rng = np.random.default_rng(0)
  b = {'images': rng.normal(size=(2, 4, 4, 1)).astype(np.float32), 'labels': np.array([1, 3], np.int32)}
  p = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0))
  @jax.jit
  @jax.grad
  def grad(p, images, label):
    return -jax.nn.log_softmax(lns_jax.forward(config, p, images))[0, label]
  grads = [grad(p, b['images'][i:i + 1], b['labels'][i]) for i in range(2)]
  norm = lambda leaves: np.sqrt(sum(np.sum(x ** 2) for x in leaves.values()))
  norms = [[norm(flat(g['layers'][l], '')) for l in ('1', '2')] for g in grads]
  found = measure(config, p, [b])
  np.testing.assert_allclose(found['grad_norm'].value, np.mean(norms, axis=0), rtol=1e-4)
  assert np.isnan(found['grad_norm_thirds'].value).all()


@pytest.mark.parametrize('g, expected', [
    (np.diag([3.0, 4.0]), 25 / 16), (np.outer([1.0, 2.0, 3.0], [4.0, 5.0]), 1), (np.zeros((2, 3)), 0),
    (np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0], 8), (1e-30 * np.diag([3.0, 4.0]), 25 / 16)])
def test_stable_ranks_of_known_matrices(g, expected):
  assert float(stable_rank(jnp.asarray(g, jnp.float32))) == pytest.approx(expected, rel=1e-5)


def test_the_stable_rank_of_a_matrix_without_a_gap_is_right_to_a_percent():
  for seed in range(3):
    g = np.random.default_rng(seed).normal(size=(64, 96))
    expected = np.sum(g ** 2) / np.linalg.norm(g, 2) ** 2
    assert float(stable_rank(jnp.asarray(g, jnp.float32))) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize('values, expected', [
    ([1, 1, 2], [1 / 4, 1 / 4, 1 / 2]), ([1, 2, 3, 4], [3 / 10, 3 / 10, 4 / 10]),
    ([1, 1, 1, 1, 1], [2 / 5, 2 / 5, 1 / 5]), ([1, 1], [np.nan] * 3), ([0, 0, 0], [np.nan] * 3)])
def test_thirds_give_layers_left_over_to_the_first_then_the_middle(values, expected):
  np.testing.assert_allclose(thirds(values), expected)
  np.testing.assert_allclose(thirds([values, values]), [expected, expected])
