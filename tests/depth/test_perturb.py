"""Perturbation of single layers: known limits, and swaps by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax import depth
from lns_jax.depth import interventions, states
from lns_jax.layers import attention, block
from lns_jax.models import layout, loss, transformer
from tiny import batch, model, params


def loss_of_order(config, p, b, order):
  """Mean loss with the layers applied in another order, each with its own index."""
  p = layout.unstack(p)
  x = transformer.enter(config, p, b['tokens'])[0]
  ctx = attention.context(config, x, b['segment_ids'])
  for l in order:
    x, _ = block.Block(config).apply({'params': p['layers'][str(l)]}, x, ctx, l)
  w = loss.weights(b)
  return float(jnp.sum(loss.token_losses(transformer.head(config, p, x), b['targets'], w)) / jnp.sum(w))


SLOW = dict(marks=pytest.mark.slow)


@pytest.mark.parametrize('scheme', [pytest.param('lns', **SLOW), pytest.param('post', **SLOW), 'mix'])
def test_limits_and_swaps(scheme):
  config, b = model(scheme=scheme, num_layers=4, mix_fraction=0.5), batch()
  p = params(config)
  found = depth.perturb(config, p, [b], noises=(0.0, 0.5), scales=(0.0, 1.0))
  removed = depth.layer_drop(config, p, [b])['layer_drop'].value
  np.testing.assert_allclose(found['scale'].value[0], removed, atol=5e-6)
  np.testing.assert_allclose(found['scale'].value[1], 0, atol=5e-6)
  np.testing.assert_allclose(found['noise'].value[0], 0, atol=5e-6)
  assert (np.abs(found['noise'].value[1]) > 1e-5).all()
  whole = loss_of_order(config, p, b, (1, 2, 3, 4))
  expected = [loss_of_order(config, p, b, order) - whole for order in ((2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3))]
  np.testing.assert_allclose(found['swap'].value, expected, atol=5e-6)


def test_a_single_layer_has_no_neighbour_to_swap_with():
  config = model(num_layers=1)
  found = depth.perturb(config, params(config), [batch()], scales=(1.0,))
  assert found.keys() == {'baseline', 'noise', 'scale'}
  assert found['noise'].value.shape == (3, 1) and abs(found['scale'].value[0, 0]) < 5e-6


def test_noise_is_as_large_as_asked_token_by_token():
  whole = lambda i, x: x * 1.5 + 2.0
  x = jax.random.normal(jax.random.key(0), (2, 5, 8))
  noise = interventions._changes(whole, {}, None, states.keys_of(1, 0, 2))['noise']
  added = whole(0, x) - x
  extra = noise(0, 0.3, x) - x - added
  np.testing.assert_allclose(jnp.linalg.norm(extra, axis=-1), 0.3 * jnp.linalg.norm(added, axis=-1), rtol=1e-5)
  assert float(jnp.abs(noise(1, 0.3, x) - noise(0, 0.3, x)).max()) > 0.01


def test_the_same_seed_is_the_same_noise():
  config, b = model(), batch()
  p = params(config)
  run = lambda seed: depth.perturb(config, p, [b, b], seed=seed)['noise'].value
  np.testing.assert_array_equal(run(0), run(0))
  assert not np.allclose(run(0), run(1))
