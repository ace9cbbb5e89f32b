"""Leaves find their layers by the usual names, whatever library named them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.errors import UserError
from lns_jax.models.by_layer import layer_of, sums


@pytest.mark.parametrize('path, layer', [
    ('layers/7/attn/q', 7), ('layers_7/kernel', 7), ('h.7', 7), ('block_7', 7), ('h/7/w', 7), ('layer7/w', 7),
    ('params/EncoderBlock_12/Dense_0/kernel', 12), ('model.layers.7.self_attn.q_proj', 7), ('blocks/0', 0),
    ('encoder/layer_3/mlp_layers_0/kernel', 3), ('layers_3_attn/w', 3)])
def test_a_number_behind_a_known_name_is_the_layer(path, layer):
  assert layer_of(path) == layer


@pytest.mark.parametrize('path', ['embed/table', 'head/table', 'LayerNorm_0/scale', 'Dense_0/kernel', 'batch_norm_3/w'])
def test_other_names_are_outside(path):
  assert layer_of(path) is None


def test_stacked_leaves_run_over_layers():
  assert layer_of('layers/1-3,5-5/attn/q') == (1, 2, 3, 5)
  assert list(itertools.islice(layer_of('layers/mlp/kernel'), 3)) == [0, 1, 2]


W = np.arange(24.0).reshape(4, 2, 3)
STYLES = [
    {'layers': {str(l): {'w': W[l - 1], 'b': W[l - 1, 0]} for l in range(1, 5)}},
    {'layers': [{'w': w, 'b': w[0]} for w in W]},
    {'params': {f'Block_{l}': {'Dense_0': {'w': W[l], 'b': W[l, 0]}} for l in range(4)}},
    {f'h.{l}.{name}': x for l in range(4) for name, x in (('w', W[l]), ('b', W[l, 0]))},
    {'layers': {'w': W, 'b': W[:, 0]}},
    {'layers': {'1-3': {'w': W[:3], 'b': W[:3, 0]}, '4-4': {'w': W[3:], 'b': W[3:, 0]}}},
]


@pytest.mark.parametrize('tree', STYLES)
def test_sums_are_the_same_however_the_tree_is_built(tree):
  tree = tree | {'embed': np.array([100.0, 1.0])}
  layers, everything = sums(lambda x, y: x * y, tree, tree)
  expected = np.sum(W ** 2, axis=(1, 2)) + np.sum(W[:, 0] ** 2, axis=1)
  np.testing.assert_allclose(layers, expected)
  np.testing.assert_allclose(everything, expected.sum() + 10001)


def test_layers_are_in_the_order_of_their_numbers():
  layers, _ = sums(jnp.abs, {f'layers_{l}': np.float32([l]) for l in range(12)})
  np.testing.assert_array_equal(layers, range(12))


def test_sums_of_half_precision_are_float32():
  layers, everything = sums(jnp.square, {'layers': jnp.full((2, 3), 300, jnp.float16)})
  np.testing.assert_allclose(layers, [27e4, 27e4])
  assert everything.dtype == jnp.float32


@pytest.mark.parametrize('tree, other, message', [
    ({'Dense_0': W}, {'Dense_0': W}, "no path names a layer, the first is 'Dense_0'"),
    ({'layers': {'a': W}}, {'layers': {'b': W}}, 'do not have the same leaves'),
    ({'layers': {'w': W, 'v': W[:3]}}, {'layers': {'w': W, 'v': W[:3]}}, 'layers/w seems to belong to layers 0 to 3'),
    ({'blocks': W, 'layers_2': W[2]}, {'blocks': W, 'layers_2': W[2]}, 'layers_2 seems to belong to layer 2,'),
    ({'layers': {'w': np.ones(())}}, {'layers': {'w': np.ones(())}}, 'layers/w is a scalar')])
def test_trees_that_do_not_fit_are_refused(tree, other, message):
  with pytest.raises(UserError, match=message):
    sums(lambda x, y: x * y, tree, other)


def test_a_layer_of_that_names_too_few_layers_is_refused():
  with pytest.raises(UserError, match='w has 4 entries along its leading axis, but layer_of names 2 layers'):
    sums(jnp.abs, {'w': W}, layer_of=lambda path: (1, 2))
