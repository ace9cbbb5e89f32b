"""The MLP of each kind against values by hand and numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.layers.mlp import MLP
from tiny import model, params


def apply(p, x, **settings):
  config = model(d_model=1, num_heads=1, num_kv_heads=1, head_dim=2, d_ff=1, **settings)
  p = {name: jnp.array(v) for name, v in p.items()}
  return float(MLP(config).apply({'params': p}, jnp.full((1, 1, 1), x), 1)[0, 0, 0])


@pytest.mark.parametrize('x, gelu', [(1.0, 0.8413447), (3.0, 2.9959503), (-1.0, -0.1586553)])
def test_gelu_is_exact(x, gelu):
  # known fault I11: the tanh form is 0.8411920 at 1 and 2.9963626 at 3
  p = {'up': [[1.0]], 'down': [[2.0]]}
  assert apply(p, x, mlp='gelu') == pytest.approx(2 * gelu, abs=2e-7)


def test_swiglu_by_hand():
  # silu(2) * 3 = 2 / (1 + e^-2) * 3
  assert apply({'gate': [[2.0]], 'up': [[3.0]], 'down': [[1.0]]}, 1.0) == pytest.approx(6 / (1 + np.exp(-2)), rel=1e-6)


def test_biases_by_hand():
  gelu = {'up': [[2.0]], 'up_bias': [-1.0], 'down': [[2.0]], 'down_bias': [0.5]}
  assert apply(gelu, 1.0, mlp='gelu', bias='all') == pytest.approx(2 * 0.8413447 + 0.5, rel=1e-6)
  swiglu = gelu | {'gate': [[0.0]], 'gate_bias': [2.0]}
  assert apply(swiglu, 1.0, bias='all') == pytest.approx(2 * (2 / (1 + np.exp(-2))) + 0.5, rel=1e-6)


@pytest.mark.parametrize('settings, attn, mlp', [
    ({}, [], []), ({'bias': 'qkv'}, 'qkv', []), ({'bias': 'all'}, 'qkvo', ['gate', 'up', 'down']),
    ({'bias': 'all', 'mlp': 'gelu'}, 'qkvo', ['up', 'down'])])
def test_biases_start_at_zero_where_asked_and_change_no_other_draw(settings, attn, mlp):
  found = params(model(**settings))['layers']['1']
  biases = {f'{sub}/{n}' for sub in ('attn', 'mlp') for n in found[sub] if 'bias' in n}
  assert biases == {*(f'attn/{n}_bias' for n in attn), *(f'mlp/{n}_bias' for n in mlp)}
  assert not any(found[b.split('/')[0]][b.split('/')[1]].any() for b in biases)
  plain = params(model(**settings | {'bias': 'none'}))['layers']['1']
  for sub in ('attn', 'mlp'):
    jax.tree.map(np.testing.assert_array_equal, plain[sub], {n: found[sub][n] for n in plain[sub]})
