"""What the leaves of a Qwen2.5-VL's vision tower are called on Hugging Face, and how they lie there."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lns_jax.config import ModelConfig


class Leaf(NamedTuple):
  """ours: path in the tower's parameters. theirs: name behind 'visual.'. ours_of: their array -> ours."""

  ours: str
  theirs: str
  ours_of: Callable[[np.ndarray], np.ndarray]


def as_is(x: np.ndarray) -> np.ndarray:
  """Vectors lie alike."""
  return x


def transposed(x: np.ndarray) -> np.ndarray:
  """[out, in] -> [in, out]."""
  return x.T


def leaves(config: ModelConfig) -> list[Leaf]:
  """Every leaf of a tower; several may be parts of one of their tensors (q, k and v are)."""
  D = config.d_model
  found = [
      Leaf('embed/patch', 'patch_embed.proj.weight', lambda x: x.reshape(D, -1).T),
      Leaf('final_norm/gain', 'merger.ln_q.weight', as_is),
      *(leaf for ours, theirs in (('up', 'merger.mlp.0'), ('down', 'merger.mlp.2'))
        for leaf in (Leaf(f'head/{ours}', f'{theirs}.weight', transposed),
                     Leaf(f'head/{ours}_bias', f'{theirs}.bias', as_is))),
  ]
  for place, l in enumerate(config.layer_ids):
    found += [leaf._replace(ours=f'layers/{l}/{leaf.ours}', theirs=f'blocks.{place}.{leaf.theirs}')
              for leaf in _block(config)]
  return found


def _block(config: ModelConfig) -> list[Leaf]:
  D, H, h = config.d_model, config.num_heads, config.head_dim
  found = [
      Leaf('attn_in_norm/gain', 'norm1.weight', as_is), Leaf('mlp_in_norm/gain', 'norm2.weight', as_is),
      Leaf('attn/o', 'attn.proj.weight', lambda x: x.T.reshape(H, h, D)), Leaf('attn/o_bias', 'attn.proj.bias', as_is),
  ]
  for third, name in enumerate('qkv'):
    part = lambda x, third=third: np.split(x, 3)[third]
    found += [Leaf(f'attn/{name}', 'attn.qkv.weight', lambda x, part=part: part(x).T.reshape(D, H, h)),
              Leaf(f'attn/{name}_bias', 'attn.qkv.bias', part)]
  for name in ('gate', 'up', 'down'):
    found += [Leaf(f'mlp/{name}', f'mlp.{name}_proj.weight', transposed),
              Leaf(f'mlp/{name}_bias', f'mlp.{name}_proj.bias', as_is)]
  return found
