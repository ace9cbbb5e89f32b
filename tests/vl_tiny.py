"""The tiny Qwen2.5-VL of tests/fixtures/qwen2_5_vl*.npz as ours."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

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


def newer() -> dict:
  """config.json as transformers 5 writes it."""
  meta = hf_fixtures.fixture('qwen2_5_vl')[0]
  rope = {'rope_type': 'default', **meta['rope']}
  text = meta['text'] | {'model_type': 'qwen2_5_vl_text', 'rope_parameters': rope, 'use_sliding_window': False,
                         'sliding_window': None, 'layer_types': ['full_attention'] * 2, 'vision_token_id': 7}
  vision = meta['vision'] | {'model_type': 'qwen2_5_vl_vision', 'tokens_per_second': 4,
                             'rope_parameters': {'rope_type': 'axial', 'rope_theta': 10000.0}}
  return {'model_type': 'qwen2_5_vl', 'architectures': ['Qwen2_5_VLForConditionalGeneration'], 'text_config': text,
          'vision_config': vision, 'tie_word_embeddings': False, 'dtype': 'float32', **meta['ids']}


def tensors(names='newer') -> dict[str, np.ndarray]:
  arrays = hf_fixtures.fixture('qwen2_5_vl')[1]
  found = {n.removeprefix('weight/'): x for n, x in arrays.items() if n.startswith('weight/')}
  if names == 'newer':
    return found
  return {n.replace('model.visual.', 'visual.').replace('model.language_model.', 'model.'): x for n, x in found.items()}


def write(folder, *, vocab: int = 0, first_id: int = 0, spread: float = 0.0):
  """A Hugging Face folder of the fixture's model; with `vocab` another table and head, and ids from first_id on."""
  settings, arrays = newer(), tensors()
  if vocab:
    rng = np.random.default_rng(0)
    for name in ('model.language_model.embed_tokens.weight', 'lm_head.weight'):
      arrays[name] = (spread * rng.standard_normal((vocab, arrays[name].shape[1]))).astype(np.float32)
    settings['text_config']['vocab_size'] = vocab
    settings |= {name: first_id + n for n, name in enumerate(hf_fixtures.fixture('qwen2_5_vl')[0]['ids'])}
  return save(folder, settings, arrays)


def save(folder, settings: dict, arrays: dict):
  """A Hugging Face folder of a config.json and tensors."""
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(settings))
  safetensors.numpy.save_file(arrays, folder / 'model.safetensors')
  return folder
