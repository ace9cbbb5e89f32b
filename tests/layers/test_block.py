"""The one equation, term by term."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.errors import UserError
from lns_jax.layers import attention, block, schemes
from tiny import batch, model, params

X = jnp.asarray(np.random.default_rng(3).normal(size=(2, 8, 64)), jnp.float32)


def context(config):
  b = batch(2, 8)
  return attention.context(config, jnp.asarray(b['tokens']), jnp.asarray(b['segment_ids']))


def rms(x, gain):
  return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * gain


@pytest.mark.parametrize('scheme', schemes.SCHEMES)
@pytest.mark.parametrize('l', [1, 3, 4])
def test_every_scheme_obeys_the_equation(scheme, l):
  """y = post * out_norm(a x + b res_norm(f(s in_norm(c x)))), with f's own output taken from the block."""
  config = model(scheme=scheme, num_layers=4)
  p = params(config)['layers'][str(l)]
  y, out = block.Block(config).apply({'params': p}, X, context(config), l)
  row, x = block.row(config, l), np.asarray(X, np.float64)
  for sub in block.SUBLAYERS:
    k = block.factors(config, l)[sub]
    gain = lambda kind: np.asarray(p[f'{sub}_{kind}_norm']['gain'], np.float64)
    h = k.c * x
    h = k.s * (rms(h, gain('in')) if row.in_norm else h)
    np.testing.assert_allclose(out[f'{sub}_x'], x, atol=2e-5)
    np.testing.assert_allclose(out[f'{sub}_in'], h, atol=2e-5)
    f = np.asarray(out[f'{sub}_out'], np.float64)
    branch = k.b * (rms(f, gain('res')) if row.res_norm else f)
    np.testing.assert_allclose(out[f'{sub}_branch'], branch, atol=2e-5)
    x = k.a * x + branch
    x = k.post * (rms(x, gain('out')) if row.out_norm else x)
  np.testing.assert_allclose(y, x, atol=5e-5)
  assert y is out['out']


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
