"""Decoding with a cache gives what the whole model gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax.config import RopeScaling
from lns_jax.errors import UserError
from lns_jax.layers.schemes import SCHEMES
from lns_jax.models import decode, layout, transformer
from tiny import model, params, rebuilt

FORWARD = jax.jit(transformer.forward, static_argnums=0)
EXTEND = jax.jit(decode.extend, static_argnums=0, static_argnames='last')
SMALL = dict(d_model=16, d_ff=32, num_layers=3)


def tokens(rows, T, seed=0):
  return np.random.default_rng(seed).integers(0, 256, (rows, T)).astype(np.int32)


def cached(config, p, tokens_BT, pieces, S=None, first_B=None):
  """Logits of every token, read in pieces of these lengths."""
  cache = decode.init(config, len(tokens_BT), S or tokens_BT.shape[1], first_B)
  found, at = [], 0
  for n in pieces:
    logits, cache = EXTEND(config, p, tokens_BT[:, at:at + n], cache)
    found.append(logits)
    at += n
  return np.concatenate(found, axis=1)


@functools.cache
def of_scheme(scheme):
  """A model of layers 1, 2 and 4 of 5 and its parameters: layers are known by their index, not by their place."""
  config = model(scheme=scheme, mix_fraction=0.5, prores_steps=10, ramp_step=15, layer_ids=(1, 2, 4), depth=5, **SMALL)
  return config, params(config)


@pytest.mark.parametrize('scheme, loop', [
    pytest.param(s, loop, marks=() if loop == 'unrolled' or s in ('lns', 'mix') else pytest.mark.slow)
    for s in SCHEMES for loop in ('unrolled', 'scan')])
def test_cached_equals_uncached(scheme, loop):
  config, p = of_scheme(scheme)
  config = rebuilt(config, loop=loop)
  t, p = tokens(2, 9), layout.native(p, config)
  np.testing.assert_allclose(cached(config, p, t, [3, 3, 3], S=12), FORWARD(config, p, t), rtol=0, atol=1e-5)


OTHERS = {
    'window': dict(sliding_window=3),
    'a window in some layers': dict(sliding_window=2, window_layers=(2,)),
    'learned positions': dict(positions='learned', max_positions=10),
    'llama3': dict(rope_scaling=RopeScaling('llama3', factor=4.0, original_length=8)),
    'yarn': dict(rope_scaling=RopeScaling('yarn', factor=4.0, original_length=8)),
    'one key head': dict(num_kv_heads=1),
    'biases, norms of queries, tied': dict(bias='all', qk_norm='head', tie_embeddings=True, clip_qkv=0.5),
}


@pytest.mark.parametrize('loop', ['unrolled', pytest.param('scan', marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', OTHERS)
def test_prompt_in_pieces_then_token_by_token(name, loop):
  config = model(loop=loop, **SMALL, **OTHERS[name])
  p, t = params(config), tokens(2, 10)
  np.testing.assert_allclose(cached(config, p, t, [4, 3, 1, 1, 1]), FORWARD(config, p, t), rtol=0, atol=1e-5)


def test_positions_and_windows_matter_in_the_test_above():
  """So that it would see them ignored."""
  t = tokens(2, 10)
  plain = model(**SMALL)
  p = params(plain)
  for name in ('window', 'a window in some layers', 'llama3', 'yarn'):
    changed = model(**SMALL, **OTHERS[name])
    assert np.abs(FORWARD(changed, p, t) - FORWARD(plain, p, t))[:, -1].max() > 1e-3, name


@pytest.mark.parametrize('settings', [{}, {'sliding_window': 3}, {'positions': 'learned', 'max_positions': 9}])
def test_a_row_beside_longer_ones_is_as_alone(settings):
  config = model(**SMALL, **settings)
  p, t = params(config), tokens(3, 9)
  lengths = [9, 4, 6]
  ragged = np.zeros_like(t)
  for row, n in zip(range(3), lengths):
    ragged[row, 9 - n:] = t[row, :n]
    ragged[row, :9 - n] = 200 + row  # what stands in the padding does not matter
  found = cached(config, p, ragged, [6, 1, 1, 1], first_B=[9 - n for n in lengths])
  for row, n in zip(range(3), lengths):
    alone = FORWARD(config, p, t[row:row + 1, :n])[0]
    np.testing.assert_allclose(found[row, 9 - n:], alone, rtol=0, atol=1e-5)


def test_bfloat16_keeps_keys_in_its_type_and_gives_the_same():
  config = model(precision='bfloat16', **SMALL)
  p, t = params(config), tokens(2, 8)
  assert {x.dtype for x in jax.tree.leaves(decode.init(config, 2, 8).layers)} == {jnp.dtype('bfloat16')}
  full = np.asarray(FORWARD(config, p, t))
  found = cached(config, p, t, [4, 1, 1, 1, 1])
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, full, rtol=0, atol=2 ** -6 * np.abs(full).max())


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_a_model_without_a_layer_continues_as_without_a_cache(loop):
  """Known fault R1: L = 4 without its second layer, 8 greedy tokens."""
  config = model(num_layers=4, loop=loop, d_model=16, d_ff=32, scheme='lns')
  config, p = lns_jax.remove_layers(config, params(config), [2])
  ids = tokens(1, 5)
  logits, cache = EXTEND(config, p, ids, decode.init(config, 1, 13))
  for _ in range(8):
    padded = np.zeros((1, 13), np.int32)
    padded[:, :ids.shape[1]] = ids
    whole = FORWARD(config, p, padded)[:, ids.shape[1] - 1]
    np.testing.assert_allclose(logits[:, -1], whole, rtol=0, atol=1e-5)
    ids = np.concatenate([ids, np.argmax(whole, axis=-1)[:, None].astype(np.int32)], axis=1)
    logits, cache = EXTEND(config, p, ids[:, -1:], cache)


def test_the_last_logits_alone():
  config = model(**SMALL)
  p, t = params(config), tokens(2, 5)
  logits, _ = EXTEND(config, p, t, decode.init(config, 2, 8), last=True)
  np.testing.assert_allclose(logits, FORWARD(config, p, t)[:, -1], rtol=0, atol=1e-5)


def test_more_tokens_than_slots_are_no_number():
  config = model(**SMALL)
  p, t = params(config), tokens(1, 4)
  logits, cache = EXTEND(config, p, t, decode.init(config, 1, 6))
  assert np.isfinite(logits).all() and decode.slots(cache) == 6
  assert np.isnan(EXTEND(config, p, t, cache)[0]).all()


def test_a_step_writes_the_cache_where_it_lies():
  """No copy of keys or values in the compiled step but of the slot that is written."""
  config = model(**SMALL)
  p = params(config)
  step = jax.jit(functools.partial(decode.extend, config), donate_argnums=2)
  program = step.lower(p, tokens(1, 1), decode.init(config, 1, 48)).compile()
  whole = [line for line in program.as_text().splitlines() if ' copy(' in line and ('48,4]' in line or '4,48]' in line)]
  assert not whole, whole
  assert program.memory_analysis().alias_size_in_bytes >= 3 * 2 * 2 * 48 * 4 * 4  # layers, k and v, heads, S, h, bytes


@pytest.mark.parametrize('settings, words', [
    (dict(causal=False), 'causal = False predicts no next token'),
    (dict(family='vit', causal=False, image_size=8, patch_size=4), 'family vit predicts no next token'),
])
def test_a_model_without_a_next_token_is_refused(settings, words):
  with pytest.raises(UserError, match=words):
    decode.init(model(**({'vocab_size': 32000} if 'family' in settings else {}), **settings), 1, 8)
