"""Eight devices give the digits of one: every measure, parameters split as in training, padding in the batch."""

import functools

import jax
import numpy as np
import pytest

from lns_jax import samples, sharding
from lns_jax.config import MeshConfig
from lns_jax.depth import measures
from lns_jax.depth.estimate import Estimate
from tiny import batch, model, params

CONFIG = model(vocab_size=40, d_model=16, d_ff=32, num_layers=3, scheme='lns', loop='scan')
FAST = ('layer_drop', 'perturb', 'cka')
SPLIT, DATA = MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=8)


def found(kind: str, settings: MeshConfig, devices: int) -> dict:
  """Ten rows in one batch, which eight devices fill up with rows of padding."""
  mesh, b = sharding.make_mesh(settings, jax.devices()[:devices]), batch(rows=10, T=8, vocab=40)
  rows = [{k: v[i] for k, v in b.items()} for i in range(10)]
  with sharding.use(mesh):
    placed = jax.device_put(params(CONFIG), sharding.params(mesh, CONFIG))
    return measures.LOSS[kind].run(CONFIG, placed, samples.Batches(rows, mesh), seed=0)


alone = functools.cache(lambda kind: found(kind, MeshConfig(), 1))


@pytest.mark.parametrize('kind, settings', [
    pytest.param(kind, settings, marks=() if kind in FAST and settings == SPLIT else pytest.mark.slow)
    for kind in measures.LOSS for settings in (SPLIT, DATA)])
def test_eight_devices_give_the_digits_of_one(kind, settings):
  """To 1e-6, and differences of losses to 1e-6 of a loss of 4 nats: sums in float32 have another order.

  Lanczos steps amplify that in what is behind the largest singular value: residuals, and quantiles, which then fall on
  a neighbouring node. t-SNE goes wherever the last digit sends it: of its points the shape alone is compared.
  """
  one, spread = alone(kind), found(kind, settings, 8)
  assert spread.keys() == one.keys()
  for name, expected in one.items():
    amplified = name.endswith(('spectrum', 'residual'))
    for part in ('value', 'low', 'high') if isinstance(expected, Estimate) else ():
      np.testing.assert_allclose(getattr(spread[name], part), getattr(expected, part), err_msg=f'{name} {part}',
                                 rtol=0.1 if amplified else 1e-6, atol=1e-4 if amplified else 4e-6)
    if kind == 'tsne' and name.endswith('points'):
      assert spread[name].shape == expected.shape
    elif isinstance(expected, (np.ndarray, float)):
      largest = np.abs(expected).max(initial=0.0)
      np.testing.assert_allclose(spread[name], expected, rtol=1e-6, atol=2e-6 * largest, err_msg=name)
    elif not isinstance(expected, Estimate):
      assert spread[name] == expected
