"""Removal of layers, of sub-layers, of blocks of layers; pruning: the same numbers as models built without them."""

import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax import depth
from lns_jax.depth import removal
from lns_jax.errors import UserError
from lns_jax.models import layout, loss, transformer
from tiny import batch, model, params


def mean_loss(config, p, b):
  w = loss.weights(b)
  logits = transformer.forward(config, p, b['tokens'], segment_ids=b['segment_ids'])
  return float(jnp.sum(loss.token_losses(logits, b['targets'], w)) / jnp.sum(w))


def without(config, p, ids, b):
  return mean_loss(*lns_jax.remove_layers(config, p, ids), b)


def silenced(config, p, layer, sub):
  """The parameters with one sub-layer's output projection 0."""
  matrix, p = {'attn': 'o', 'mlp': 'down'}[sub], layout.unstack(p)
  block = p['layers'][layer]
  block = block | {sub: block[sub] | {matrix: 0 * block[sub][matrix]}}
  return layout.native(p | {'layers': p['layers'] | {layer: block}}, config)


@pytest.mark.parametrize('scheme', [pytest.param('pre', marks=pytest.mark.slow), 'lns', 'mix',
                                    pytest.param('deepnorm', marks=pytest.mark.slow)])
def test_the_rise_is_that_of_the_model_without_the_layer(scheme):
  config, b = model(scheme=scheme, num_layers=4, mix_fraction=0.5), batch()
  p = params(config)
  found = depth.layer_drop(config, p, [b])
  whole = mean_loss(config, p, b)
  assert float(found['baseline'].value) == pytest.approx(whole, rel=1e-6)
  expected = [without(config, p, [l], b) - whole for l in config.layer_ids]
  np.testing.assert_allclose(found['layer_drop'].value, expected, atol=4e-6)


@pytest.mark.parametrize('scheme, loop, d_model, rows', [
    ('lns', 'scan', 64, 4), ('peri', 'unrolled', 64, 4), ('group_ln', 'scan', 16, 3),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ('pre', 'scan', 16, 3), ('peri', 'scan', 64, 4), ('mix', 'unrolled', 16, 3), ('lns', 'unrolled', 16, 3)))])
def test_a_layer_that_does_nothing_costs_exactly_nothing(scheme, loop, d_model, rows):
  """Known fault R4; at some shapes a baseline from a program of its own was 2e-7 off."""
  config = model(scheme=scheme, num_layers=4, loop=loop, d_model=d_model, d_ff=24)
  p = silenced(config, silenced(config, params(config), '2', 'attn'), '2', 'mlp')
  found = depth.layer_drop(config, p, [batch(rows=rows, T=8), batch(rows=rows, T=8, seed=1)])['layer_drop']
  assert found.value[1] == 0.0 and found.low[1] == found.high[1] == 0.0
  assert (found.value[[0, 2, 3]] != 0).all()


def test_pruning_refuses_batches_that_are_gone_after_one_round():
  config = model(num_layers=3)
  with pytest.raises(UserError, match='reads the batches once a round: give a list'):
    depth.prune(config, params(config), (batch() for _ in range(2)))


@pytest.mark.parametrize('scheme', ['lns', 'peri'])
def test_without_a_sublayer_is_with_its_output_silenced(scheme):
  """Where the branch is added to an untouched stream."""
  config, b = model(scheme=scheme, num_layers=3), batch()
  p = params(config)
  found, whole = depth.sublayer_drop(config, p, [b]), mean_loss(config, p, b)
  for sub in ('attn', 'mlp'):
    expected = [mean_loss(config, silenced(config, p, str(l), sub), b) - whole for l in config.layer_ids]
    np.testing.assert_allclose(found[f'{sub}_drop'].value, expected, atol=4e-6)


def test_without_a_sublayer_its_norm_and_factors_go_too():
  """Post-LN: silencing the MLP would leave its norm at work."""
  config, b = model(scheme='post', num_layers=2), batch()
  p = params(config)
  found, whole = depth.sublayer_drop(config, p, [b]), mean_loss(config, p, b)
  assert found['mlp_drop'].value[0] != pytest.approx(mean_loss(config, silenced(config, p, '1', 'mlp'), b) - whole,
                                                     abs=1e-4)


def test_blocks_of_layers_are_models_without_them():
  config, b = model(scheme='lns', num_layers=4), batch()
  p = params(config)
  found, whole = depth.block_drop(config, p, [b])['block_drop'].value, mean_loss(config, p, b)
  assert found.shape == (3, 4)
  for n in (1, 2, 3):
    for l in range(1, 5):
      if l + n > 5:
        assert np.isnan(found[n - 1, l - 1])
      else:
        assert found[n - 1, l - 1] == pytest.approx(without(config, p, range(l, l + n), b) - whole, abs=2e-6)


@pytest.mark.parametrize('scheme', ['lns', 'mix'])
def test_pruning_takes_the_cheapest_layer_again_and_again(scheme):
  config, b = model(scheme=scheme, num_layers=4, mix_fraction=0.5), batch()
  p = params(config)
  seen = []
  found = depth.prune(config, p, [b], done=lambda ids: seen.append(list(ids)))
  gone, rises, whole = [], [], mean_loss(config, p, b)
  while len(gone) < 3:
    costs = {l: without(config, p, [*gone, l], b) - whole for l in config.layer_ids if l not in gone}
    best = min(costs, key=costs.get)
    gone.append(best)
    rises.append(costs[best])
  assert list(found.order) == gone and seen == [gone[:1], gone[:2], gone]
  np.testing.assert_allclose(found.rise.value, rises, atol=3e-6)


def test_a_score_takes_the_place_of_the_loss_and_groups_rows():
  """Two questions of two rows each: the score of a question is whether its first row is the likelier."""
  config, b = model(num_layers=2), batch(rows=4)
  p = params(config)
  def right(logits, b):
    losses = jnp.sum(loss.token_losses(logits, b['targets'], loss.weights(b)), axis=1).reshape(-1, 2)
    return (losses[:, 0] < losses[:, 1]).astype(jnp.float32), jnp.ones(2)
  found = depth.layer_drop(config, p, [b], score_fn=right)
  def naive(config, p):
    logits = transformer.forward(config, p, b['tokens'], segment_ids=b['segment_ids'])
    return float(jnp.mean(right(logits, b)[0]))
  assert found['baseline'].tokens == 2 and found['baseline'].value == naive(config, p)
  expected = [naive(*lns_jax.remove_layers(config, p, [l])) - naive(config, p) for l in (1, 2)]
  np.testing.assert_allclose(found['layer_drop'].value, expected)


def test_counts_of_removable_layers():
  rise = np.array([[0.02, 0.005, 0.0, -0.1], [0.02, 0.02, 0.02, 0.02]])
  np.testing.assert_array_equal(removal.removable(rise, np.array([1.0, 1.0])), [3, 0])
  np.testing.assert_allclose(removal.last_third(np.array([1.0, 1.0, 1.0, 0.5, -3.0, 0.5, -3.0])), 0.5 / 4)


def test_a_model_with_one_layer_is_refused():
  config = model(num_layers=1)
  for measure in (depth.layer_drop, depth.block_drop, depth.prune):
    with pytest.raises(UserError, match='one layer'):
      measure(config, params(config), [batch()])


def test_a_batch_without_targets_is_one_sentence():
  with pytest.raises(UserError, match="a loss needs 'targets'.*has \\['tokens'\\]"):
    depth.layer_drop(model(), params(model()), [{'tokens': batch()['tokens']}])


def test_no_batches_is_an_error():
  with pytest.raises(UserError, match='no batches'):
    depth.layer_drop(model(), params(model()), [])


def test_a_layer_that_is_not_there_cannot_be_left_out():
  with pytest.raises(UserError, match=r'0\.\.1, got \[2\]'):
    depth.interventions.run(model(), params(model()), [batch()], depth.interventions.Plan.of('skip', [0], 1), removed=[2])
