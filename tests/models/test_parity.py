"""The model computes what transformers computes: logits, states, gradients; reference numbers by make_fixtures.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.config import ModelConfig
from lns_jax.layers import attention
from lns_jax.layers.norms import Norm
from lns_jax.models import transformer
from lns_jax.train import step
from models import test_architectures
from hf_fixtures import CLOSE, fixture, model, ours, read

NAMES = ('llama_gqa', 'llama_mha_tied', 'llama_mqa')
CASES = (('llama_gqa', 'unrolled'), ('llama_gqa', 'scan'), ('llama_mha_tied', 'scan'), ('llama_mqa', 'unrolled'))


@pytest.mark.parametrize('name, loop', CASES)
def test_logits_at_every_position(name, loop):
  right = fixture(name)[1]['logits']
  assert right.shape[:2] == (2, 32) and 1 < np.abs(right).max() < 100
  np.testing.assert_allclose(ours(name, loop)[0], right, **CLOSE)


@pytest.mark.parametrize('name, loop', CASES)
def test_states_are_embedding_and_every_block_before_the_final_norm(name, loop):
  # known fault D4: the last of transformers' own hidden_states lies behind the final norm
  config, params, _, right = model(name)
  states = ours(name, loop)[1]
  np.testing.assert_allclose(states, right['states'], **CLOSE)
  normed = Norm(config).apply({'params': params['final_norm']}, states[-1])
  np.testing.assert_allclose(normed, right['normed'], **CLOSE)
  assert np.abs(right['states'][-1] - right['normed']).max() > 0.1


def test_states_is_what_apply_taps():
  config, params, tokens, right = model('llama_mqa')
  states = jax.jit(lambda p: transformer.states(config, p, tokens))(params)
  assert states.shape == (config.num_layers + 1, *tokens.shape, config.d_model)
  np.testing.assert_allclose(states, right['states'], **CLOSE)


@pytest.mark.parametrize('name, loop', CASES)
def test_layernorm_scaling_is_the_norms_output_over_the_root_of_the_layer(name, loop):
  right = fixture(name)[1]
  logits, states = ours(name, loop, 'lns')
  np.testing.assert_allclose(logits, right['lns_logits'], **CLOSE)
  np.testing.assert_allclose(states, right['lns_states'], **CLOSE)
  assert np.abs(right['lns_logits'] - right['logits']).max() > 0.1


@pytest.mark.parametrize('name, loop', CASES)
def test_loss_and_its_gradient_by_every_weight(name, loop):
  # of a tied model: both ends of the embedding contribute (known fault I8)
  config, params, tokens, right = model(name, loop=loop)
  segments = np.ones_like(tokens)
  segments[:, -1] = 0  # the last token has no target
  batch = {'tokens': tokens, 'targets': np.roll(tokens, -1, axis=1), 'segment_ids': segments}
  def mean_loss(p):
    total, (weight, _) = step.loss_sums(config, p, batch)
    return total / weight
  loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
  np.testing.assert_allclose(loss, right['loss'], rtol=1e-6)
  expected = read(name, config, 'grad')
  assert jax.tree.structure(grads) == jax.tree.structure(expected)
  for (path, ours), theirs in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max(), err_msg=str(path))


@pytest.mark.parametrize('name', NAMES + test_architectures.NAMES)
def test_packed_documents_get_the_logits_of_documents_run_alone(name):
  config, params, tokens, right = model(name)
  segments = 1 + (np.arange(tokens.shape[1]) >= fixture(name)[0]['cut']) * np.ones_like(tokens)
  logits = jax.jit(lambda p: transformer.forward(config, p, tokens, segment_ids=segments))(params)
  np.testing.assert_allclose(logits, right['packed_logits'], **CLOSE)


@pytest.mark.parametrize('name', NAMES)
def test_greedy_continuation(name):
  config, params, _, right = model(name)
  forward = jax.jit(lambda tokens: transformer.forward(config, params, tokens))
  tokens = np.zeros_like(right['greedy'])
  prompt = fixture(name)[0]['prompt']
  tokens[:, :prompt] = right['greedy'][:, :prompt]
  for t in range(prompt, tokens.shape[1]):  # what follows position t - 1 is still zero and must not be seen
    tokens[:, t] = forward(tokens)[:, t - 1].argmax(-1)
  np.testing.assert_array_equal(tokens, right['greedy'])


@pytest.mark.parametrize('change', [{'rope_base': 2e4}, {'norm_eps': 3e-5}, {'scheme': 'lns'}, {'scheme': 'post'}])
def test_the_reference_tells_wrong_settings_apart(change):
  config, params, tokens, right = model('llama_mqa')
  wrong = dataclasses.replace(config, **change)
  if change.get('scheme') == 'post':
    params['layers'] = {l: {n.replace('in_norm', 'out_norm'): v for n, v in p.items()}
                        for l, p in params['layers'].items()}
  logits = jax.jit(lambda p: transformer.forward(wrong, p, tokens))(params)
  assert np.abs(logits - right['logits']).max() > 1e-3


def test_variance_of_the_last_state_is_not_that_of_a_normalised_one():
  # known fault D4, the tell-tale: behind a final norm with unit gain the mean square is 1 whatever goes in
  config, params, tokens, _ = model('llama_gqa')
  louder = {**params, 'embed': {'table': 100 * params['embed']['table']}}
  mean_square = jax.jit(lambda p: jnp.mean(jnp.square(transformer.states(config, p, tokens)[-1])))
  quiet, loud = mean_square(params), mean_square(louder)
  assert abs(quiet - 1) > 0.1 and loud > 10 * quiet


@pytest.mark.parametrize('position, expected', [
    (0, [1, 0, 0, 0]),
    (1, [0.5403023, 0, 0.8414710, 0]),  # cos 1, sin 1; the interleaved layout has the sine at index 1
    (2, [-0.4161468, 0, 0.9092974, 0]),
])
def test_rotary_positions_pair_the_halves_of_a_head(position, expected):
  # known fault I1: base 10000, head width 4, q = [1, 0, 0, 0]
  config = ModelConfig(vocab_size=8, d_model=4, num_layers=1, num_heads=1, precision='float32')
  ctx = attention.context(config, jnp.zeros((1, 3), jnp.int32), None)
  q_BTHh = jnp.zeros((1, 3, 1, 4)).at[..., 0].set(1)
  np.testing.assert_allclose(attention.rotate(q_BTHh, ctx)[0, position, 0], expected, atol=1e-6)


def test_rotary_frequencies_fall_within_a_half():
  # second pair of a head of 4: frequency 10000^(-1/2) = 0.01
  config = ModelConfig(vocab_size=8, d_model=4, num_layers=1, num_heads=1, precision='float32')
  ctx = attention.context(config, jnp.zeros((1, 2), jnp.int32), None)
  q_BTHh = jnp.zeros((1, 2, 1, 4)).at[..., 3].set(1)
  np.testing.assert_allclose(attention.rotate(q_BTHh, ctx)[0, 1, 0], [0, -0.0099998, 0, 0.9999500], atol=1e-6)
