"""Which state, and which weight, is said not to be finite."""

import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.depth import finite
from lns_jax.errors import UserError
from lns_jax.models import layout
from tiny import model, params


def test_the_state_nearest_the_embedding_is_named_and_in_it_the_first_real_token():
  config = model(layer_ids=(2, 5), depth=6)
  states, mask = np.zeros((3, 2, 4, 8), np.float32), np.array([[0, 1, 1, 1], [1, 1, 1, 0]])
  states[2], states[1, 0, 0], states[1, 1, 1:] = np.nan, np.inf, -np.inf
  found = np.asarray(finite.first_bad(jnp.asarray(states), jnp.asarray(mask)))
  np.testing.assert_array_equal(found, [[-1, -1, 1], [-1, 1, 0]])
  with pytest.raises(UserError, match='^the output of layer 2 is not finite at token 1 of sequence 11.$'):
    finite.check(config, {}, found, 10)
  finite.check(config, {}, found[:, :1], 10)
  states[0, 1, 2] = np.nan
  with pytest.raises(UserError, match='the output of the embedding is not finite at token 2 of sequence 1.'):
    finite.check(config, {}, np.asarray(finite.first_bad(jnp.asarray(states), jnp.asarray(mask))), 0)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_a_weight_is_named_with_its_layer_in_both_layouts(loop):
  config = model(num_layers=3, loop=loop)
  p = layout.unstack(params(config))
  finite.check_weights(layout.native(p, config))
  p['layers']['2']['mlp']['up'] = p['layers']['2']['mlp']['up'].at[1, 0].set(jnp.nan)
  with pytest.raises(UserError, match='^runs/pre: the weight layers/2/mlp/up is not finite.$'):
    finite.check_weights(layout.native(p, config), 'runs/pre')
