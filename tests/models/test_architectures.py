"""Architectures beside Llama compute what transformers computes, and each of their settings is what makes it so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.models import transformer
from hf_fixtures import CLOSE, fixture, model, ours

NAMES = ('qwen2', 'qwen3', 'mistral', 'olmo', 'olmo2')


@pytest.mark.parametrize('name', NAMES)
def test_parameters_are_those_of_the_architecture(name):
  config, params, _, right = model(name)
  shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
  assert len(jax.tree.leaves(params)) == sum(n.startswith('weight/') for n in right)


def test_qwen2_has_biases_on_queries_keys_and_values_only():
  # known fault I3: 12 tensors a layer, the embedding and the final norm
  _, params, _, _ = model('qwen2')
  assert len(jax.tree.leaves(params)) == 26
  assert {n for n in params['layers']['1']['attn'] if 'bias' in n} == {'q_bias', 'k_bias', 'v_bias'}


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
@pytest.mark.parametrize('name', NAMES)
def test_logits_and_states(name, loop):
  right = fixture(name)[1]
  logits, states = ours(name, loop)
  assert right['logits'].shape[:2] == (2, 16) and 1 < np.abs(right['logits']).max() < 100
  np.testing.assert_allclose(logits, right['logits'], **CLOSE)
  np.testing.assert_allclose(states, right['states'], **CLOSE)


@pytest.mark.parametrize('name', [n for n in NAMES if n != 'olmo2'])
def test_layernorm_scaling_of_every_architecture_with_input_norms(name):
  right = fixture(name)[1]
  logits, states = ours(name, 'scan', 'lns')
  np.testing.assert_allclose(logits, right['lns_logits'], **CLOSE)
  np.testing.assert_allclose(states, right['lns_states'], **CLOSE)
  assert np.abs(right['lns_logits'] - right['logits']).max() > 0.1


@pytest.mark.parametrize('name, change', [
    ('mistral', {'sliding_window': 3}), ('mistral', {'sliding_window': 5}), ('mistral', {'sliding_window': 0}),
    ('qwen2', {'bias': 'none'}), ('qwen2', {'rope_base': 1e4}),
    ('qwen3', {'qk_norm': 'none'}), ('olmo2', {'qk_norm': 'none'}),
    ('olmo', {'clip_qkv': 0.0}), ('olmo', {'clip_qkv': 0.7}), ('olmo', {'norm_eps': 1e-4}),
])
def test_the_reference_tells_wrong_settings_apart(name, change):
  config, params, tokens, right = model(name)
  wrong = dataclasses.replace(config, **change)
  logits = jax.jit(lambda p: transformer.forward(wrong, p, tokens))(params)
  assert np.abs(logits - right['logits']).max() > 1e-2
