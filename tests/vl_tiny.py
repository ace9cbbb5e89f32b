"""The tiny Qwen2.5-VL of tests/fixtures/qwen2_5_vl*.npz as ours."""

import functools

import jax.numpy as jnp

import hf_fixtures
from lns_jax.config import ModelConfig
from lns_jax.interop import names, vl_families
from lns_jax.models import layout, vl


@functools.cache
def reference() -> dict:
  """Inputs of both rows and what transformers computes."""
  return hf_fixtures.fixture('qwen2_5_vl')[1] | hf_fixtures.fixture('qwen2_5_vl_states')[1]


def config(**changes) -> vl.VLConfig:
  """The settings of the fixture; changes: of both towers."""
  meta = hf_fixtures.fixture('qwen2_5_vl')[0]
  t, v, ids = meta['text'], meta['vision'], meta['ids']
  text = ModelConfig(
      vocab_size=t['vocab_size'], d_model=t['hidden_size'], d_ff=t['intermediate_size'],
      num_layers=t['num_hidden_layers'], num_heads=t['num_attention_heads'], num_kv_heads=t['num_key_value_heads'],
      norm_eps=t['rms_norm_eps'], bias='qkv', rope_base=meta['rope']['rope_theta'],
      rope_sections=tuple(meta['rope']['mrope_section']), precision='float32', **changes)
  vision = ModelConfig(
      family='tower', causal=False, bias='all', d_model=v['hidden_size'], d_ff=v['intermediate_size'],
      num_layers=v['depth'], num_heads=v['num_heads'], patch_size=v['patch_size'], out_width=v['out_hidden_size'],
      window_size=v['window_size'], window_layers=(1, 3), precision='float32', **changes)
  return vl.VLConfig(text=text, vision=vision, image_id=ids['image_token_id'], video_id=ids['video_token_id'],
                     start_id=ids['vision_start_token_id'], end_id=ids['vision_end_token_id'])


def model(**changes):
  """(VLConfig, parameters)."""
  ours, arrays = config(**changes), reference()
  theirs = lambda name: jnp.asarray(arrays[f'weight/{name}'])
  text = hf_fixtures.tree(ours.text, lambda n: theirs(n.replace('model.', 'model.language_model.', 1)))
  rows = names.table(ours.vision, vl_families.FAMILIES[vl_families.VISION].rows)
  vision = names.nested({e.ours: e.read(theirs(f'model.{e.theirs}'), ours.vision) for e in rows})
  return ours, {'vision': layout.native(vision, ours.vision), 'text': layout.native(text, ours.text)}
