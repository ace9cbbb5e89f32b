"""Rows split over devices by position: the same numbers, and nothing gathered but keys and values."""

import re

import jax
import numpy as np
import pytest

from lns_jax import sharding
from lns_jax.config import MeshConfig
from lns_jax.models import transformer
from lns_jax.train import step as step_lib
from tiny import batch, leaves_close, model, params

B, T = 4, 32  # documents and padding begin within the shares of 8 or 16 positions: at 10 + r % 3 and 32 - r % 5


def on(mesh, config, f, p, b):
  """f(p, b) compiled for a mesh, parameters and rows where a run has them; and its result."""
  with sharding.use(mesh):
    compiled = jax.jit(f, in_shardings=(sharding.params(mesh, config), sharding.batch(mesh))).lower(p, b).compile()
    return compiled, jax.device_get(compiled(p, b))


def sums(config):
  """The summed loss, its gradient, and the squares of the stream in every layer."""
  def f(p, b):
    grads, total, _, stats = step_lib.accumulate(config, p, b, 1, with_stats=True)
    return grads, total, stats
  return f


CASES = {
    'grouped': dict(scheme='lns'),
    'windows': dict(scheme='lns', sliding_window=11, loop='scan'),
    'everything': dict(scheme='lns_learned', qk_norm='full', bias='all', sliding_window=11, window_layers=(2,)),
    'both ways': dict(scheme='branch_lns', causal=False),
    'learned positions': dict(positions='learned', max_positions=T, num_kv_heads=4, loop='scan'),
}


@pytest.mark.parametrize('case, axes', [
    ('windows', {'data': 2, 'sequence': 2, 'tensor': 2}),
    pytest.param('grouped', {'data': 2, 'sequence': 4}, marks=pytest.mark.slow),
    *[pytest.param(case, axes, marks=pytest.mark.slow) for case in ('everything', 'both ways', 'learned positions')
      for axes in ({'data': 1, 'fsdp': 2, 'sequence': 2, 'tensor': 2}, {'data': 1, 'sequence': 8})]])
def test_positions_on_several_devices_are_those_on_one(case, axes):
  with jax.enable_x64(True):
    config = model(**CASES[case], precision='float64')
    p, b = params(config), batch(B, T)
    expected = jax.device_get(jax.jit(sums(config))(p, b))
    _, found = on(sharding.make_mesh(MeshConfig(**axes)), config, sums(config), p, b)
    leaves_close(found, expected, 1e-12)


@pytest.mark.parametrize('axes', [{'data': 2, 'sequence': 2, 'tensor': 2}, {'data': 2, 'sequence': 4}])
def test_keys_and_values_alone_are_gathered(axes):
  config = model(scheme='lns')
  p, b = params(config), batch(B, T)
  forward = lambda p, b: transformer.before_head(config, p, b)[0]
  compiled, found = on(sharding.make_mesh(MeshConfig(**axes)), config, forward, p, b)
  leaves_close(found, jax.jit(forward)(p, b), 1e-6)
  gathered = re.findall(r'= (\w+)\[([\d,]*)\]\S* all-gather', compiled.as_text())
  floats = [tuple(map(int, shape.split(','))) for kind, shape in gathered if kind.startswith('f')]
  K, h = config.num_kv_heads // axes.get('tensor', 1), config.head_dim
  assert floats == [(B // 2, T, K, h)] * 2 * config.num_layers
  assert all(np.prod([int(n) for n in shape.split(',')]) <= B * T for kind, shape in gathered if kind[0] != 'f')
  assert 'all-to-all' not in compiled.as_text()
