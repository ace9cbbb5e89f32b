"""Small models and batches for tests. Gains are random: ones hide faults."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import config as config_lib
from lns_jax.layers import schemes
from lns_jax.models import layout, transformer

MODEL = config_lib.ModelConfig(
    vocab_size=256, d_model=64, d_ff=128, num_layers=2, num_heads=4, num_kv_heads=2, init_std=0.1)


def model(**changes) -> config_lib.ModelConfig:
  """The tiny model with other settings."""
  return rebuilt(MODEL, **changes)


def rebuilt(config: config_lib.ModelConfig, **changes) -> config_lib.ModelConfig:
  """A changed copy whose derived settings (ids, depth, head width) are derived anew."""
  fresh = {'layer_ids': (), 'depth': 0, 'head_dim': 0} if {'num_layers', 'd_model', 'num_heads'} & set(changes) else {}
  return dataclasses.replace(config, **{**fresh, **changes})


def params(config: config_lib.ModelConfig, seed: int = 0, random_gains: bool = True):
  """Initial parameters with gains and learned factors uniform in [0.5, 1.5], the same for both layouts."""
  tree = layout.unstack(transformer.init(config, jax.random.key(seed), batch(vocab=config.vocab_size)))
  return layout.native(with_random_gains(tree, seed) if random_gains else tree, config)


def with_random_gains(tree, seed: int = 0):
  """Canonical parameters with gains, biases of norms and learned factors uniform in [0.5, 1.5]."""
  rng, names = np.random.default_rng(seed), {'gain', 'bias', 'alpha', *schemes.LEARNED}
  return jax.tree_util.tree_map_with_path(
      lambda path, x: jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype) if path[-1].key in names else x, tree)


def batch(rows: int = 4, T: int = 16, vocab: int = 256, seed: int = 0, segments: bool = True) -> dict:
  """Random tokens and targets; rows of two documents and ragged padding."""
  rng = np.random.default_rng(seed)
  found = {name: rng.integers(0, vocab, (rows, T)).astype(np.int32) for name in ('tokens', 'targets')}
  ids = np.ones((rows, T), np.int32)
  if segments:
    for r in range(rows):
      ids[r, T // 3 + r % 3:] = 2
      ids[r, T - r % 5:] = 0
  return found | {'segment_ids': ids}


def leaves_close(a, b, tolerance: float):
  """Asserts that two trees agree leaf by leaf, relative to each leaf's largest entry."""
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    scale = max(np.abs(y).max(initial=0.0), 1e-30)
    assert np.abs(x - y).max(initial=0.0) <= tolerance * scale, jax.tree_util.keystr(path)
