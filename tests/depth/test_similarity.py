"""HSIC_1 against its definition over quadruples, CKA against what it must not feel, and against a naive float64 one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax.depth import similarity
from lns_jax.depth.similarity import cka
from lns_jax.errors import UserError
from lns_jax.models import layout
from tiny import batch, model, params, rebuilt

STATES = jax.jit(lns_jax.states, static_argnums=0)
HSIC = jax.jit(similarity.hsic)
SMALL = dict(vocab_size=40, d_model=16, d_ff=32, num_heads=2, num_kv_heads=1, num_layers=3)


def normalised(h):
  return h / np.sqrt(np.outer(np.diag(h), np.diag(h)))


def test_hsic_is_the_mean_over_all_quadruples_of_different_tokens():
  """HSIC = E[k_ij l_ij] + E[k_ij] E[l_qr] - 2 E[k_ij l_iq] (Gretton et al. 2005), without bias: i, j, q, r differ."""
  x = np.random.default_rng(0).normal(size=(2, 7, 3)) + 1
  k = np.einsum('snd,smd->snm', x, x)
  found, defined = HSIC(x.astype(np.float32), np.ones(7))
  for s, t in itertools.product(range(2), range(2)):
    right = np.mean([k[s, i, j] * (k[t, i, j] + k[t, q, r] - 2 * k[t, i, q])
                     for i, j, q, r in itertools.permutations(range(7), 4)])
    assert found[s, t] == pytest.approx(right, rel=1e-5)
  assert defined == 1


def test_tokens_outside_of_the_mask_are_not_there():
  x = np.random.default_rng(0).normal(size=(3, 9, 4)).astype(np.float32)
  mask = np.array([1, 0, 1, 1, 0, 1, 1, 1, 0], np.float32)
  garbage = np.where(mask[:, None] > 0, x, np.nan)
  np.testing.assert_allclose(HSIC(garbage, mask)[0], HSIC(x[:, mask > 0], np.ones(6))[0], rtol=1e-5)
  found, defined = HSIC(x, np.arange(9) < 3)
  assert defined == 0 and (found == 0).all()


def test_cka_feels_no_turn_no_scale_and_no_shift():
  rng = np.random.default_rng(1)
  x = rng.normal(size=(200, 16)) * rng.uniform(0.1, 10, 16)
  turn = np.linalg.qr(rng.normal(size=(16, 16)))[0]
  other = x @ rng.normal(size=(16, 16)) + rng.normal(size=(200, 16))
  same = normalised(np.asarray(HSIC(np.stack([x, 30 * x @ turn + 100, other]).astype(np.float32), np.ones(200))[0]))
  assert same[0, 1] == pytest.approx(1, abs=1e-5) and same[0, 2] < 0.99
  assert same[0, 2] == pytest.approx(same[1, 2], rel=1e-4)


def test_small_mini_batches_have_no_bias():
  """Of 8 tokens with 64 independent units, the plain CKA says that everything is like everything."""
  rng = np.random.default_rng(2)
  x = rng.normal(size=(1000, 2, 8, 64)).astype(np.float32)
  h = np.mean(jax.vmap(HSIC, in_axes=(0, None))(x, jnp.ones(8))[0], axis=0)
  assert abs(normalised(h)[0, 1]) < 0.03
  centred = x[0] - x[0].mean(axis=1, keepdims=True)
  k = np.einsum('snd,smd->snm', centred, centred)
  assert normalised(np.einsum('snm,tnm->st', k, k))[0, 1] > 0.7


def naive(config, p, batches, size, together):
  """CKA in float64 by the printed formula, group by group."""
  total, weight, parts = 0, 0, []
  for b in batches:
    states = np.asarray(STATES(config, p, b['tokens'], segment_ids=b['segment_ids']), np.float64)
    real = b['segment_ids'] > 0
    G = -(-len(real) // together)
    for g in range(G):
      x = states[:, g::G][:, real[g::G]]
      M = -(-x.shape[1] // size)
      parts += [x[:, m::M] for m in range(M)]
  for x in parts:
    n = x.shape[1]
    if n < 4:
      continue
    k = np.einsum('snd,smd->snm', x, x) * (1 - np.eye(n))
    one = np.ones(n)
    h = np.array([[np.trace(a @ b) + (one @ a @ one) * (one @ b @ one) / (n - 1) / (n - 2)
                   - 2 / (n - 2) * (one @ a @ b @ one) for b in k] for a in k]) / n / (n - 3)
    total, weight = total + n * h, weight + n
  return normalised(total / weight), weight


@pytest.mark.parametrize('changes, size, together', [
    pytest.param(dict(), 256, 8, marks=pytest.mark.slow), (dict(loop='scan', scheme='mix', mix_fraction=0.5), 10, 2),
    (dict(scheme='lns', layer_ids=(1, 4, 5), depth=6, precision='bfloat16'), 7, 3)], ids=str)
def test_cka_of_a_model_is_the_naive_one(changes, size, together):
  config = rebuilt(model(**SMALL), **changes)
  p, batches = params(config), [batch(vocab=40, rows=5), batch(vocab=40, rows=5, seed=1)]
  found = cka(config, p, batches, size=size, together=together)['cka']
  right, tokens = naive(config, p, batches, size, together)
  assert found.value.shape == (4, 4) and found.tokens == tokens
  np.testing.assert_allclose(found.value, right, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(np.diag(found.value), 1, rtol=1e-12)
  assert (found.low <= found.high).all()


def test_rows_of_padding_and_the_split_into_batches_change_nothing():
  config, b = model(**SMALL), batch(vocab=40, rows=8)
  p = params(config)
  once = cka(config, p, [b], together=4)['cka'].value
  halves = [{k: v[part::2] for k, v in b.items()} for part in (0, 1)]
  np.testing.assert_allclose(cka(config, p, halves, together=4)['cka'].value, once, rtol=1e-5)
  dealt = cka(config, p, [b], size=10, together=4)['cka'].value
  for places in (np.arange(8), np.arange(8) + 4, np.arange(8) * 2):
    padded = {k: np.zeros((16, *v.shape[1:]), v.dtype) for k, v in b.items()}
    for k in b:
      padded[k][places] = b[k]
    np.testing.assert_allclose(cka(config, p, [padded], size=10, together=4)['cka'].value, dealt, rtol=1e-5)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_a_layer_that_does_nothing_leaves_the_same_state(loop):
  config = model(**SMALL, loop=loop)
  p = layout.unstack(params(config))
  for sub, matrix in (('attn', 'o'), ('mlp', 'down')):
    p['layers']['2'][sub][matrix] *= 0
  found = cka(config, layout.native(p, config), [batch(vocab=40)])['cka'].value
  assert found[1, 2] == pytest.approx(1, abs=1e-6) and found[0, 1] < 0.999
  np.testing.assert_allclose(found, found.T)


def test_what_cannot_be_compared_is_an_error():
  config, b = model(**SMALL), batch(vocab=40)
  p = params(config)
  with pytest.raises(UserError, match='no batches'):
    cka(config, p, [])
  with pytest.raises(UserError, match='no mini-batch has 4 real tokens'):
    cka(config, p, [b | {'segment_ids': (np.arange(16) < 1) * np.ones((3, 1), np.int32)} | {
        k: b[k][:3] for k in ('tokens', 'targets')}])
  with pytest.raises(UserError, match='4 tokens or more'):
    cka(config, p, [b], size=3)
  p['layers']['3']['mlp']['down'] = p['layers']['3']['mlp']['down'].at[0, 0].set(np.inf)
  with pytest.raises(UserError, match='the weight layers/3/mlp/down is not finite'):
    cka(config, p, [b])
