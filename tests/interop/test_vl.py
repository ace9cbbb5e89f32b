"""Opening a Qwen2.5-VL: both ways in which its tensors are named and its settings are written."""

import copy
import json
import math

import jax
import numpy as np
import pytest

import hf_fixtures
import lns_jax
import vl_tiny
from lns_jax.config import ModelConfig
from lns_jax.data import pictures
from lns_jax.errors import UserError
from lns_jax.interop import families, names, vl, vl_families
from lns_jax.models import vl as vl_model
from vl_tiny import newer, save, tensors


def older() -> dict:
  """config.json as published in 2025: the decoder's fields beside those of the whole."""
  meta = hf_fixtures.fixture('qwen2_5_vl')[0]
  vision = {'in_chans': 3, 'spatial_patch_size': 2, **meta['vision']}
  del vision['in_channels']
  return {'model_type': 'qwen2_5_vl', 'vision_config': vision, **meta['text'], **meta['ids'],
          'use_sliding_window': False, 'sliding_window': 32768, 'max_window_layers': 2,
          'rope_theta': meta['rope']['rope_theta'],
          'rope_scaling': {'type': 'mrope', 'mrope_section': meta['rope']['mrope_section']}, 'torch_dtype': 'bfloat16',
          'tie_word_embeddings': False, 'vision_token_id': 44}


@pytest.mark.parametrize('config, names', [(newer(), 'newer'), (older(), 'older'), (newer(), 'older')])
def test_settings_and_every_tensor_are_read(tmp_path, config, names):
  ours, params, tokenizer = vl.load(save(tmp_path / 'm', config, tensors(names)))
  wanted, leaves = vl_tiny.model()
  for tower in vl_model.TOWERS:
    found, expected = getattr(ours, tower), getattr(wanted, tower)
    for name in vars(expected):
      if name not in ('precision', 'max_positions'):
        assert getattr(found, name) == getattr(expected, name), (tower, name)
  assert (ours.image_id, ours.video_id, ours.start_id, ours.end_id) == (40, 41, 42, 43) and tokenizer is None
  jax.tree.map(np.testing.assert_array_equal, params, leaves)


def test_a_tied_head_is_the_embedding(tmp_path):
  arrays = tensors()
  del arrays['lm_head.weight']
  _, params, _ = vl.load(save(tmp_path / 'm', newer() | {'tie_word_embeddings': True}, arrays))
  assert 'head' not in params['text']
  with pytest.raises(UserError, match='no tensor lm_head.weight'):
    vl.load(save(tmp_path / 'm', newer(), arrays))


def changed(config, path, value):
  config = copy.deepcopy(config)
  *above, last = path
  node = config
  for name in above:
    node = node[name]
  node[last] = value
  return config


@pytest.mark.parametrize('path, value, words', [
    (('vision_config', 'hidden_act'), 'gelu', ['hidden_act', "'silu'"]),
    (('vision_config', 'new_field'), 3, ['new_field']),
    (('vision_config', 'rope_parameters'), {'rope_type': 'yarn'}, ['rope_parameters', 'axial']),
    (('vision_config', 'out_hidden_size'), 20, ['visual.merger.mlp.2.weight', '[24, 64]', '[20, 64]']),
    (('vision_config', 'window_size'), 3, ['model.window_size = 3', '4']),
    (('text_config', 'new_field'), 3, ['new_field']),
    (('text_config', 'rope_parameters'), {'rope_type': 'default', 'rope_theta': 1e4}, ['mrope_section']),
    (('text_config', 'rope_parameters'), {'rope_type': 'default', 'mrope_section': [2, 1, 2]}, ['(2, 1, 2)', '4']),
    (('new_field',), 3, ['new_field']),
    (('model_type',), 'qwen3_vl', ['qwen3_vl', 'qwen2_5_vl']),
    (('vision_config',), None, ['vision_config']),
])
def test_a_setting_that_would_change_the_model_is_refused_by_name(tmp_path, path, value, words):
  with pytest.raises(UserError) as e:
    vl.load(save(tmp_path / 'm', changed(newer(), path, value), tensors()))
  assert all(w in str(e.value) for w in words), e.value


PUBLISHED = {  # the 7B's of January 2025
    'model_type': 'qwen2_5_vl', 'vision_start_token_id': 151652, 'vision_end_token_id': 151653,
    'vision_token_id': 151654, 'image_token_id': 151655, 'video_token_id': 151656, 'hidden_act': 'silu',
    'hidden_size': 3584, 'intermediate_size': 18944, 'max_position_embeddings': 128000, 'max_window_layers': 28,
    'num_attention_heads': 28, 'num_hidden_layers': 28, 'num_key_value_heads': 4, 'rms_norm_eps': 1e-6,
    'rope_theta': 1e6, 'sliding_window': 32768, 'tie_word_embeddings': False, 'use_sliding_window': False,
    'vision_config': {
        'depth': 32, 'hidden_act': 'silu', 'hidden_size': 1280, 'intermediate_size': 3420, 'num_heads': 16,
        'in_chans': 3, 'out_hidden_size': 3584, 'patch_size': 14, 'spatial_merge_size': 2, 'spatial_patch_size': 14,
        'window_size': 112, 'fullatt_block_indexes': [7, 15, 23, 31], 'tokens_per_second': 2,
        'temporal_patch_size': 2},
    'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 24]}, 'vocab_size': 152064}


@pytest.mark.slow
def test_the_published_7b_has_its_published_size():
  _, *parts = vl_families.split(PUBLISHED, 'config.json')
  tensors, numbers = set(), 0
  for fields in parts:
    family, settings = families.of(fields, 'config.json', vl_families.FAMILIES)
    config = ModelConfig(**settings)
    tensors |= {entry.theirs for entry in names.table(config, family.rows)}
    numbers += sum(math.prod(x.shape) for x in names.shapes(config).values())
  assert len(tensors) == 729 and 2 * numbers == 16_584_333_312  # total_size of its index, in bf16


def test_windows_are_as_the_file_says(tmp_path):
  folder = save(tmp_path / 'm', changed(newer(), ('vision_config', 'fullatt_block_indexes'), [0, 1, 2]), tensors())
  assert [vl.load(folder)[0].vision.window(l) for l in (1, 2, 3)] == [0, 0, 0]
  folder = save(tmp_path / 'm', changed(newer(), ('vision_config', 'fullatt_block_indexes'), []), tensors())
  assert [vl.load(folder)[0].vision.window(l) for l in (1, 2, 3)] == [8, 8, 8]


@pytest.mark.parametrize('change, words', [
    ({'drop': 'model.visual.blocks.1.attn.qkv.bias'}, ['no tensor visual.blocks.1.attn.qkv.bias']),
    ({'drop': 'model.language_model.layers.1.mlp.up_proj.weight'}, ['no tensor model.layers.1.mlp.up_proj.weight']),
    ({'name': 'model.visual.blocks.1.attn.qkv.weight', 'shape': (32, 16)}, ['[32, 16]', '[48, 16]']),
    ({'name': 'model.visual.blocks.3.norm1.weight', 'shape': (16,)}, ['visual.blocks.3.norm1.weight']),
    ({'name': 'encoder.weight', 'shape': (16,)}, ['encoder.weight']),
])
def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(tmp_path, change, words):
  arrays = tensors()
  if 'drop' in change:
    del arrays[change['drop']]
  else:
    arrays[change['name']] = np.zeros(change['shape'], np.float32)
  with pytest.raises(UserError) as e:
    vl.load(save(tmp_path / 'm', newer(), arrays))
  assert all(w in str(e.value) for w in words), e.value


def test_the_plain_load_says_what_opens_it(tmp_path):
  with pytest.raises(UserError, match='lns_jax.interop.vl.load'):
    lns_jax.load(save(tmp_path / 'm', newer(), tensors()))


def test_pictures_are_prepared_as_the_folder_says(tmp_path):
  config = vl_tiny.config()
  assert vl.processor(tmp_path, config).max_pixels == pictures.Processor().max_pixels
  file = tmp_path / 'preprocessor_config.json'
  file.write_text(json.dumps({'min_pixels': 64, 'max_pixels': 4096, 'patch_size': 2, 'image_mean': [0.5, 0.4, 0.3]}))
  found = vl.processor(tmp_path, config)
  assert (found.min_pixels, found.max_pixels, found.patch_size, found.mean) == (64, 4096, 2, (0.5, 0.4, 0.3))
  assert vl.processor(tmp_path, config, max_pixels=1024).max_pixels == 1024
  file.write_text(json.dumps({'size': {'shortest_edge': 64, 'longest_edge': 2048}}))
  assert (vl.processor(tmp_path, config).min_pixels, vl.processor(tmp_path, config).max_pixels) == (64, 2048)
  for name, value in {'resample': 2, 'patch_size': 14, 'do_normalize': False, 'rescale_factor': 0.5}.items():
    file.write_text(json.dumps({name: value}))
    with pytest.raises(UserError, match=name):
      vl.processor(tmp_path, config)
