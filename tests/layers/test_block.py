"""The one equation, term by term."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.errors import UserError
from lns_jax.layers import attention, block, schemes
from tiny import batch, model, params

X = jnp.asarray(np.random.default_rng(3).normal(size=(2, 8, 64)), jnp.float32)


# Every scheme once more, from its source: (norms, factors by l, L and the learned parameters of the sub-layer).
silu = lambda g: g / (1 + np.exp(-g))
HAND = {
    'pre': ('in', lambda l, L, p: {}),
    'post': ('out', lambda l, L, p: {}),
    'lns': ('in', lambda l, L, p: {'s': 1 / l ** 0.5}),
    'lns_init': ('in', lambda l, L, p: {}),
    'lns_learned': ('in', lambda l, L, p: {'s': p['s'] / l ** 0.5}),
    'lns_stabilised': ('in', lambda l, L, p: {'s': (max(l - 1, 1) + 1e-3) ** -0.5}),
    'branch_lns': ('in', lambda l, L, p: {'b': 1 / l ** 0.5}),
    'lns_before': ('in', lambda l, L, p: {'c': 1 / l ** 0.5}),
    'lns_after_sum': ('in', lambda l, L, p: {'post': 1 / l ** 0.5}),
    'res_norm': ('res', lambda l, L, p: {}),
    'res_norm_lns': ('res', lambda l, L, p: {'b': 1 / l ** 0.5}),
    'sandwich': ('in res', lambda l, L, p: {}),
    'peri': ('in res', lambda l, L, p: {}),
    'deepnorm': ('out', lambda l, L, p: {'a': (2 * L) ** 0.25}),
    'mix': (lambda l, L: 'out' if l <= L // 4 else 'in', lambda l, L, p: {}),
    'layerscale': ('in', lambda l, L, p: {'b': p['b']}),
    'skipinit': ('in', lambda l, L, p: {'b': p['b']}),
    'rezero': ('in', lambda l, L, p: {'b': p['b']}),
    'admin': ('out', lambda l, L, p: {'a': p['a']}),
    'group_ln': ('in', lambda l, L, p: {}),
    'gpas': ('in', lambda l, L, p: {'post': 1 - silu(p['stream_gate'])}),
    'keel': (lambda l, L: 'in out' if l > 1 else 'in', lambda l, L, p: {'a': L if l > 1 else 1}),
    'prores': ('in', lambda l, L, p: {'b': min(STEP / (1000 * l), 1)}),
    'completep': ('in', lambda l, L, p: {'b': 2 / L}),
}
STEP = 2500  # of ProRes: layers 1 and 2 are whole, 3 has 5/6, 4 has 5/8


def context(config):
  b = batch(2, 8)
  return attention.context(config, jnp.asarray(b['tokens']), jnp.asarray(b['segment_ids']), jnp.int32(STEP))


def rms(x, gain, groups=1):
  parts = x.reshape(*x.shape[:-1], groups, -1)
  return (parts / np.sqrt(np.mean(np.square(parts), axis=-1, keepdims=True) + 1e-6)).reshape(x.shape) * gain


def learned(p, sub):
  """The learned factors of a sub-layer, and the layer's gate."""
  return {name.removeprefix(f'{sub}_'): np.asarray(v, np.float64) for name, v in p.items()
          if name in schemes.LEARNED and name.startswith((sub, schemes.GATE))}


@pytest.mark.parametrize('scheme', schemes.SCHEMES)
@pytest.mark.parametrize('l', [1, 3, 4])
def test_every_scheme_obeys_the_equation(scheme, l):
  """y = post * out_norm(a x + b res_norm(f(s in_norm(c x)))), with f's own output taken from the block."""
  config = model(scheme=scheme, num_layers=4)
  p = params(config)['layers'][str(l)]
  y, out = block.Block(config).apply({'params': p}, X, context(config), l)
  norms, by_hand = HAND[scheme]
  norms = (norms if isinstance(norms, str) else norms(l, 4)).split()
  assert {n.split('_')[1] for n in p if n.endswith('_norm')} == set(norms)
  x = np.asarray(X, np.float64)
  for sub in schemes.SUBLAYERS:
    k = dict(a=1, b=1, c=1, s=1, post=1) | by_hand(l, 4, learned(p, sub))
    normed = lambda kind, v, groups=1: (
        rms(v, np.asarray(p[f'{sub}_{kind}_norm']['gain'], np.float64), groups) if kind in norms else v)
    h = k['s'] * normed('in', k['c'] * x, 4 if scheme == 'group_ln' else 1)
    np.testing.assert_allclose(out[f'{sub}_x'], x, atol=5e-5)
    np.testing.assert_allclose(out[f'{sub}_in'], h, atol=5e-5)
    f = np.asarray(out[f'{sub}_out'], np.float64)
    branch = k['b'] * normed('res', f)
    np.testing.assert_allclose(out[f'{sub}_branch'], branch, atol=5e-5)
    x = k['post'] * normed('out', k['a'] * x + branch)
  np.testing.assert_allclose(y, x, atol=1e-4)
  assert y is out['out']


def test_gpas_shrinks_the_stream_but_not_its_gradient():
  """y = z - SiLU(g) stop_gradient(z): dy/dz is 1, dy/dg is -SiLU'(g) z (arXiv 2506.22049)."""
  z, g = jnp.asarray([2.0, -3.0]), jnp.float32(0.7)
  np.testing.assert_allclose(block.gated(z, g), (1 - silu(0.7)) * np.array([2, -3]), rtol=1e-6)
  dz, dg = jax.grad(lambda z, g: block.gated(z, g).sum(), argnums=(0, 1))(z, g)
  np.testing.assert_allclose(dz, [1, 1], rtol=1e-6)
  sigmoid = 1 / (1 + np.exp(-0.7))
  assert float(dg) == pytest.approx(sigmoid * (1 + 0.7 * (1 - sigmoid)), rel=1e-6)  # z sums to -1


@pytest.mark.parametrize('scheme', ['gpas', 'rezero', 'skipinit', 'layerscale', 'lns_learned', 'admin'])
def test_learned_factors_are_float32_whatever_the_parameters_are(scheme):
  config = model(scheme=scheme, precision='paper_bf16')
  layer = params(config)['layers']['2']
  found = {name: v for name, v in layer.items() if name in schemes.LEARNED}
  assert found and {str(v.dtype) for v in found.values()} == {'float32'}
  assert str(layer['mlp']['up'].dtype) == 'bfloat16'


@pytest.mark.parametrize('scheme, extra', [
    ('lns', 0), ('lns_init', 0), ('lns_learned', 2), ('layerscale', 2 * 64), ('skipinit', 2), ('rezero', 2),
    ('gpas', 1), ('branch_lns', 0), ('prores', 0), ('completep', 0), ('group_ln', 0), ('sandwich', 2 * 64),
    ('peri', 2 * 64), ('keel', 2 * 64), ('admin', 2 * 64), ('post', 0), ('deepnorm', 0), ('res_norm', 0)])
def test_parameters_that_a_scheme_adds_to_a_pre_ln_block(scheme, extra):
  count = lambda scheme: sum(x.size for x in jax.tree.leaves(params(model(scheme=scheme))['layers']['2']))
  assert count(scheme) - count('pre') == extra


def test_deepnorm_multiplies_the_stream_not_the_branch():
  """Known fault N4: with alpha on f the sign of the result flips."""
  config = model(scheme='deepnorm', num_layers=12)
  p = params(config)['layers']['1']
  _, out = block.Block(config).apply({'params': p}, X, context(config), 1)
  np.testing.assert_array_equal(out['attn_branch'], out['attn_out'])
  summed = 2.2133638 * np.asarray(out['attn_x']) + np.asarray(out['attn_out'])
  np.testing.assert_allclose(out['mlp_x'], rms(summed, np.asarray(p['attn_out_norm']['gain'])), atol=2e-5)


def test_first_layer_of_lns_is_pre():
  y = [block.Block(model(scheme=s)).apply({'params': params(model())['layers']['1']}, X, context(model()), 1)[0]
       for s in ('pre', 'lns')]
  np.testing.assert_array_equal(*y)


@pytest.mark.parametrize('index', [jnp.int32(2), np.int64(2), 2.0, True])
def test_the_layer_index_must_be_a_python_int(index):
  config = model(scheme='lns')
  with pytest.raises(UserError, match='static'):
    block.Block(config).apply({'params': params(config)['layers']['2']}, X, context(config), index)


def test_a_traced_index_is_refused_in_one_sentence():
  config = model(scheme='lns')
  p = params(config)['layers']['2']
  with pytest.raises(UserError, match='Python int .* static'):
    jax.jit(lambda l: block.Block(config).apply({'params': p}, X, context(config), l))(2)


def test_a_static_index_under_jit_and_remat_is_accepted():
  config = model(scheme='lns')
  p = params(config)['layers']['2']
  f = lambda p, l: block.Block(config).apply({'params': p}, X, context(config), l)[0]
  plain = f(p, 2)
  np.testing.assert_allclose(jax.jit(f, static_argnums=1)(p, 2), plain, atol=1e-5)
  np.testing.assert_allclose(jax.jit(jax.checkpoint(f, static_argnums=1), static_argnums=1)(p, 2), plain, atol=1e-5)
