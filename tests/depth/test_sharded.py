"""Eight devices give the digits of one: every measure by itself, and a whole diagnosis."""

import functools

import jax
import numpy as np
import pytest

from lns_jax import diagnose, sharding
from lns_jax.config import MeshConfig
from lns_jax.depth import measures
from lns_jax.depth.estimate import Estimate
from tiny import batch, model, params

CONFIG = model(vocab_size=40, d_model=16, d_ff=32, num_layers=3, scheme='lns', loop='scan')
CHEAP = ('profile', 'layer_drop', 'perturb', 'cka', 'prune')
LOOSE = {'jacobian': 1e-3, 'mean_jacobian': 1e-3, 'gradients': 1e-4, 'lens': 1e-4, 'cka': 1e-4, 'linear': 1e-4}


def rows(count: int) -> list[dict]:
  b = batch(rows=count, T=8, vocab=40)
  return [{k: v[i] for k, v in b.items()} for i in range(count)]


@functools.cache
def alone(kind: str):
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  with sharding.use(mesh):
    return measures.MEASURES[kind].run(CONFIG, jax.device_put(params(CONFIG), sharding.replicated(mesh)),
                                       diagnose.Batches(rows(10), mesh), 0)


@pytest.mark.parametrize('kind', [kind if kind in CHEAP else pytest.param(kind, marks=pytest.mark.slow)
                                  for kind in measures.LOSS])
@pytest.mark.parametrize('settings', [MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=8)], ids=['fsdp', 'data'])
def test_eight_devices_give_the_digits_of_one(kind, settings):
  """Ten rows: on eight devices six rows of padding fill the batch; parameters are split as in training."""
  mesh = sharding.make_mesh(settings)
  with sharding.use(mesh):
    placed = jax.device_put(params(CONFIG), sharding.params(mesh, CONFIG))
    spread = measures.MEASURES[kind].run(CONFIG, placed, diagnose.Batches(rows(10), mesh), 0)
  assert spread.keys() == alone(kind).keys()
  for name, one in alone(kind).items():
    if not isinstance(one, Estimate):
      assert spread[name] == one
      continue
    for part in ('value', 'low', 'high'):
      np.testing.assert_allclose(getattr(spread[name], part), getattr(one, part), rtol=1e-5, atol=2e-6,
                                 err_msg=f'{name} {part}')
