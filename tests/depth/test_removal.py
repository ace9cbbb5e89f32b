"""Removal of layers: one program, exact zeros, the same numbers as a model without the layer."""

import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax import depth
from lns_jax.errors import UserError
from lns_jax.models import layout, loss, transformer
from tiny import batch, model, params


def mean_loss(config, p, b):
  w = loss.weights(b)
  logits = transformer.forward(config, p, b['tokens'], segment_ids=b['segment_ids'])
  return float(jnp.sum(loss.token_losses(logits, b['targets'], w)) / jnp.sum(w))


@pytest.mark.parametrize('scheme', ['pre', 'lns', 'mix', 'deepnorm'])
def test_the_rise_is_that_of_the_model_without_the_layer(scheme):
  config, b = model(scheme=scheme, num_layers=4, mix_fraction=0.5), batch()
  p = params(config)
  found = depth.layer_drop(config, p, [b])
  whole = mean_loss(config, p, b)
  assert float(found['baseline'].value) == pytest.approx(whole, rel=1e-6)
  expected = [mean_loss(*lns_jax.remove_layers(config, p, [l]), b) - whole for l in config.layer_ids]
  np.testing.assert_allclose(found['layer_drop'].value, expected, atol=2e-6)


@pytest.mark.parametrize('scheme', ['pre', 'lns', 'peri'])
@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_a_layer_that_does_nothing_costs_exactly_nothing(scheme, loop):
  """Known fault R4."""
  config = model(scheme=scheme, num_layers=4, loop=loop)
  p = layout.unstack(params(config))
  for sub, matrix in (('attn', 'o'), ('mlp', 'down')):
    p['layers']['2'][sub][matrix] *= 0
  found = depth.layer_drop(config, layout.native(p, config), [batch(), batch(seed=1)])['layer_drop']
  assert found.value[1] == 0.0 and found.low[1] == found.high[1] == 0.0
  assert (found.value[[0, 2, 3]] != 0).all()


def test_a_model_with_one_layer_is_refused():
  config = model(num_layers=1)
  with pytest.raises(UserError, match='one layer'):
    depth.layer_drop(config, params(config), [batch()])


def test_a_batch_without_targets_is_one_sentence():
  with pytest.raises(UserError, match="a loss needs 'targets'.*has \\['tokens'\\]"):
    depth.layer_drop(model(), params(model()), [{'tokens': batch()['tokens']}])


def test_no_batches_is_an_error():
  with pytest.raises(UserError, match='no batches'):
    depth.layer_drop(model(), params(model()), [])
