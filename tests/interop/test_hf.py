"""Hugging Face folders compute what transformers computes, and whatever is amiss in one is named."""

import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import hf_fixtures
import hf_folders
import lns_jax
from hf_folders import CLOSE, folder, reference, settings, tensors, write
from lns_jax import UserError, sharding
from lns_jax.config import MeshConfig, ModelConfig
from lns_jax.interop import families
from lns_jax.models import layout


def run(config, params, inputs):
  """(logits, states [L+1, B, T, D])."""
  @jax.jit
  def both(params):
    return lns_jax.forward(config, params, inputs), lns_jax.states(config, params, inputs)
  return both(params)


@pytest.mark.parametrize('name', hf_folders.NAMES)
def test_logits_and_states(name, tmp_path):
  right = reference(name)
  config, params, tokenizer = lns_jax.load(folder(name, tmp_path))
  assert tokenizer is None
  logits, states = run(config, params, right['inputs'])
  np.testing.assert_allclose(logits, right['logits'], **CLOSE)
  np.testing.assert_allclose(states, right['states'], **CLOSE)


@pytest.mark.parametrize('name', ['llama', 'gpt2', 'qwen2_window_types', 'llama_rope_dynamic'])
def test_the_scanned_loop_computes_the_same(name, tmp_path):
  config, params, _ = lns_jax.load(folder(name, tmp_path))
  config = dataclasses.replace(config, loop='scan')
  logits, _ = run(config, layout.stack(params, config), reference(name)['inputs'])
  np.testing.assert_allclose(logits, reference(name)['logits'], **CLOSE)


def test_a_folder_as_transformers_wrote_it():
  config, params, _ = lns_jax.load(hf_folders.FOLDERS / 'olmo2')
  np.testing.assert_allclose(
      run(config, params, reference('olmo2')['inputs'])[0], reference('olmo2')['logits'], **CLOSE)


@pytest.mark.parametrize('name', [n for n in hf_folders.NAMES if 'rope' in n])
def test_rope_scaling_as_older_files_spell_it(name, tmp_path):
  newer = settings(name)['rope_parameters']
  older = {('type' if k == 'rope_type' else k): v for k, v in newer.items() if k != 'rope_theta'}
  path = folder(name, tmp_path, rope_parameters=None, rope_theta=newer['rope_theta'], rope_scaling=older)
  config, params, _ = lns_jax.load(path)
  np.testing.assert_allclose(run(config, params, reference(name)['inputs'])[0], reference(name)['logits'], **CLOSE)


def test_each_rope_scaling_differs_from_none_and_from_the_others():
  all_logits = [reference(n)['logits'] for n in hf_folders.NAMES if n == 'llama' or 'rope' in n]
  for i, a in enumerate(all_logits):
    for b in all_logits[:i]:
      assert np.abs(a - b).max() > 1e-2


@pytest.mark.parametrize('name, layers', [('off', None), ('upper', (3, 4)), ('none', None), ('types', (1, 4))])
def test_both_gates_of_the_window(name, layers, tmp_path):
  # known fault I6: layers 0 and 1 of 4 are full, 2 and 3 have the window
  config, _, _ = lns_jax.load(folder(f'qwen2_window_{name}', tmp_path))
  assert (config.sliding_window, config.window_layers) == ((0, ()) if layers is None else (4, layers))


def test_qwen2_has_its_biases_without_being_told(tmp_path):
  # known fault I3
  config, params, _ = lns_jax.load(folder('qwen2', tmp_path))
  assert config.bias == 'qkv' and len(tensors('qwen2')) == len(jax.tree.leaves(params)) == 26
  assert np.abs(params['layers']['1']['attn']['k_bias']).max() > 0.1


def shards(name: str, n: int) -> list[dict]:
  items = sorted(tensors(name).items())
  return [dict(items[i::n]) for i in range(n)]


def test_shards_are_the_same_bits_as_one_file(tmp_path):
  _, whole, _ = lns_jax.load(folder('llama', tmp_path))
  _, parts, _ = lns_jax.load(write(tmp_path / 'parts', settings('llama'), shards('llama', 2)))
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole, parts))
  assert jax.tree.structure(whole) == jax.tree.structure(parts)


def refused(path, *words, **kwargs):
  """Loading raises one sentence with all of these words."""
  with pytest.raises(UserError) as error:
    lns_jax.load(path, **kwargs)
  for word in words:
    assert word in str(error.value), str(error.value)


def test_what_is_amiss_with_shards_is_named(tmp_path):
  # known fault I9
  path = write(tmp_path / 'gone', settings('llama'), shards('llama', 2))
  (path / 'model-00002-of-00002.safetensors').unlink()
  refused(path, 'model-00002-of-00002.safetensors')
  path = write(tmp_path / 'lies', settings('llama'), shards('llama', 2))
  index = path / 'model.safetensors.index.json'
  where = json.loads(index.read_text())
  where['weight_map']['model.norm.weight'], where['weight_map']['lm_head.weight'] = [
      f'model-0000{i}-of-00002.safetensors' for i in (1, 2)] if 'model.norm.weight' in shards('llama', 2)[1] else [
      f'model-0000{i}-of-00002.safetensors' for i in (2, 1)]
  index.write_text(json.dumps(where))
  refused(path, 'does not hold', 'safetensors')
  index.write_text(json.dumps({'weight_map': {'lm_head.weight': '../other.safetensors'}}))
  refused(path, '../other.safetensors', 'own folder')


@pytest.mark.parametrize('name, tensor', [
    ('llama', 'model.layers.1.mlp.up_proj.weight'), ('gpt2', 'transformer.h.1.attn.c_attn.bias'),
    ('qwen3', 'model.layers.0.self_attn.q_norm.weight'), ('llama', 'lm_head.weight'),
    ('vit', 'vit.encoder.layer.2.attention.output.dense.weight')])
def test_a_missing_misshapen_or_unknown_tensor_is_named(name, tensor, tmp_path):
  have = tensors(name)
  assert tensor in have
  less = {k: v for k, v in have.items() if k != tensor}
  refused(write(tmp_path / 'less', settings(name), [less]), tensor, 'no tensor')
  shape = list(have[tensor].shape)
  wrong = np.zeros([*shape[:-1], shape[-1] + 1], np.float32)
  path = write(tmp_path / 'wrong', settings(name), [have | {tensor: wrong}])
  refused(path, tensor, str(shape), str(list(wrong.shape)))
  refused(write(tmp_path / 'more', settings(name), [have | {f'{tensor}_extra': wrong}]), f'{tensor}_extra')


def test_rotary_buffers_are_passed_over_and_a_base_model_has_no_prefix(tmp_path):
  buffers = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(6, np.float32)}
  lns_jax.load(write(tmp_path / 'buffers', settings('llama'), [tensors('llama') | buffers]))
  for name, prefix in (('llama', 'model.'), ('gpt2', 'transformer.')):
    bare = {k.removeprefix(prefix): v for k, v in tensors(name).items()}
    masks = {'h.0.attn.bias': np.zeros((1, 1, 32, 32), np.float32)} if name == 'gpt2' else {}
    config, params, _ = lns_jax.load(write(tmp_path / name, settings(name), [bare | masks]))
    np.testing.assert_allclose(run(config, params, reference(name)['inputs'])[0], reference(name)['logits'], **CLOSE)


def test_tied_and_untied_heads(tmp_path):
  # known fault I8
  tied, embedding = tensors('qwen2'), tensors('qwen2')['model.embed_tokens.weight']
  assert 'lm_head.weight' not in tied
  lns_jax.load(write(tmp_path / 'equal', settings('qwen2'), [tied | {'lm_head.weight': embedding}]))
  refused(write(tmp_path / 'other', settings('qwen2'), [tied | {'lm_head.weight': embedding + 1}]), 'lm_head.weight')
  _, params, _ = lns_jax.load(write(tmp_path / 'own', settings('qwen2') | {'tie_word_embeddings': False}, [
      tied | {'lm_head.weight': embedding + 1}]))
  np.testing.assert_array_equal(params['head']['table'], embedding + 1)
  refused(write(tmp_path / 'none', settings('qwen2') | {'tie_word_embeddings': False}, [tied]), 'lm_head.weight')


@pytest.mark.parametrize('name, change, words', [
    ('llama', {'hidden_act': 'relu'}, ['hidden_act', "'relu'", 'silu']),
    ('llama', {'partial_rotary_factor': 0.5}, ['partial_rotary_factor']),
    ('llama', {'rope_parameters': {'rope_type': 'proportional', 'factor': 2.0}}, ['proportional', 'llama3']),
    ('llama', {'rope_parameters': {'rope_type': 'linear', 'faktor': 2.0}}, ['faktor', 'factor']),
    ('llama', {'residual_multiplier': 0.2}, ['residual_multiplier', '0.2']),
    ('llama', {'quantization_config': {'bits': 4}}, ['quantization_config']),
    ('llama', {'model_type': 'lama'}, ['lama', 'llama']),
    ('llama', {'num_hidden_layers': 3}, ['model.layers.2.']),
    ('llama', {'vocab_size': 'many'}, ['vocab_size', 'many']),
    ('llama', {'hidden_size': None}, ['hidden_size']),
    ('llama', {'rms_norm_eps': float('nan')}, ['rms_norm_eps', 'nan']),
    ('qwen2', {'max_window_layers': 'two'}, ['max_window_layers', 'two']),
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True}, ['scale_attn_by_inverse_layer_idx']),
    ('gpt2', {'scale_attn_weights': False}, ['scale_attn_weights']),
    ('qwen2', {'layer_types': ['full_attention']}, ['layer_types', '2 layers']),
])
def test_a_field_that_changes_the_maths_is_honoured_or_refused_by_name(name, change, words, tmp_path):
  refused(folder(name, tmp_path, **change), 'config.json' if 'num_hidden_layers' not in change else 'no tensor', *words)


def test_other_fields_do_no_harm(tmp_path):
  path = folder('llama', tmp_path, torch_dtype='bfloat16', pretraining_tp=2, attention_dropout=0.1, _name_or_path='x',
                some_switch=False, max_sequence_length=1024)
  lns_jax.load(path)


def test_files_that_are_no_model_are_refused_in_one_sentence(tmp_path):
  refused(tmp_path / 'nothing', 'nothing at')
  (tmp_path / 'empty').mkdir()
  refused(tmp_path / 'empty', 'neither a run folder', 'config.json')
  path = folder('llama', tmp_path)
  refused(path, 'no step 3', step=3)
  whole = (path / 'model.safetensors').read_bytes()
  for part in (whole[:4], whole[:len(whole) // 2], b'\xff' * 64, b''):
    (path / 'model.safetensors').write_bytes(part)
    refused(path, 'model.safetensors')
  (path / 'model.safetensors').unlink()
  refused(path, 'neither model.safetensors')
  (path / 'config.json').write_text('{')
  refused(path, 'not JSON')


class Bomb:
  """What a pickle can do to whoever opens it."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return open, (self.path, 'w')


def test_pickles_are_refused_and_nothing_in_them_is_run(tmp_path):
  path = folder('llama', tmp_path)
  (path / 'model.safetensors').unlink()
  for name in ('pytorch_model.bin', 'model.pt'):
    (path / name).write_bytes(pickle.dumps(Bomb(str(tmp_path / 'ran'))))
    refused(path, name, 'import_hf.py --from_bin')
    refused(path / name, 'pickle', 'import_hf.py --from_bin')
    (path / name).unlink()
  assert not (tmp_path / 'ran').exists()


def test_the_type_is_that_of_the_file_or_as_asked(tmp_path):
  half = {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors('llama').items()}
  path = write(tmp_path / 'bf16', settings('llama'), [half])
  _, params, _ = lns_jax.load(path)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}
  _, wide, _ = lns_jax.load(path, dtype='float32')
  assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype('float32')}
  np.testing.assert_array_equal(params['head']['table'].astype(np.float32), wide['head']['table'])


def test_parameters_are_placed_as_asked(tmp_path):
  mesh = sharding.make_mesh(MeshConfig())
  everywhere = sharding.replicated(mesh)
  path = folder('llama', tmp_path)
  config, params, _ = lns_jax.load(path, sharding=everywhere)
  assert all(x.sharding == everywhere for x in jax.tree.leaves(params))
  tree = jax.tree.map(lambda x: everywhere, params)
  _, params, _ = lns_jax.load(path, sharding=tree)
  assert all(x.sharding == everywhere for x in jax.tree.leaves(params))
  config, params, _ = lns_jax.load(path, sharding=sharding.share)
  assert jax.tree.map(lambda x: x.sharding, params) == sharding.share(config)


def test_a_checkpoint_of_the_papers_code_takes_its_scheme_from_the_caller(tmp_path, caplog):
  # such a config.json says plain llama, and the factor is not in the weights; the reference multiplies by hooks
  found, arrays = hf_fixtures.fixture('llama_gqa')
  weights = {n.removeprefix('weight/'): x for n, x in arrays.items() if n.startswith('weight/')}
  path = write(tmp_path / 'theirs', found['config'] | {'model_type': 'llama', 'max_sequence_length': 64}, [weights])
  for scheme, name in ((None, 'logits'), ('lns', 'lns_logits')):
    caplog.clear()
    with caplog.at_level('WARNING', 'absl'):
      config, params, _ = lns_jax.load(path, scheme=scheme)
    assert ('scheme=lns' in caplog.text) == (scheme is None)
    assert config.scheme == (scheme or 'pre')
    np.testing.assert_allclose(run(config, params, arrays['tokens'])[0], arrays[name], **CLOSE)
  config, params, _ = lns_jax.load(path, scheme='post')
  assert 'attn_out_norm' in params['layers']['1']
  refused(path, 'layerscale', 'layers/1/attn_b', scheme='layerscale')


ODD = [None, 'x', '', -1, 0, 1.5, 10**12, [], {}, [1], {'a': 1}, True, float('nan'), float('inf')]


@pytest.mark.parametrize('name', ['gpt2', 'llama', 'llama_rope_longrope', 'mistral', 'olmo', 'qwen3', 'vit'])
def test_a_field_of_any_value_is_understood_or_refused(name, tmp_path):
  """Whatever JSON can hold, in every field and every field of a field, is settings or one sentence."""
  right = settings(name)
  inner = [(n, m) for n in ('rope_parameters', 'rope_scaling') if isinstance(right.get(n), dict)
           for m in ('factor', 'attention_factor', 'beta_fast', 'truncate', *right[n])]
  for path in [*((n,) for n in (*right, 'rope_scaling', 'layer_types', 'partial_rotary_factor')), *inner]:
    for value in ODD:
      config = json.loads(json.dumps(right))
      (config[path[0]] if path[1:] else config)[path[-1]] = value
      try:
        ModelConfig(**families.of(config, 'config.json')[1])
      except UserError as error:
        assert '\n' not in str(error)


@pytest.mark.parametrize('change, words', [
    ({'num_attention_heads': 0}, ['num_attention_heads', '0']), ({'vocab_size': float('inf')}, ['vocab_size', 'inf']),
    ({'num_hidden_layers': 10**12}, ['num_hidden_layers', '10000']), ({'head_dim': 10**12}, ['head_dim']),
    ({'model_type': ['llama']}, ['model_type', "['llama']"]), ({'attention_bias': 'no'}, ['attention_bias', "'no'"]),
    ({'rope_parameters': {'rope_type': 'linear', 'factor': 'x'}}, ['factor', "'x'"]),
    ({'rope_parameters': {'rope_type': 'linear', 'rope_theta': [1]}}, ['rope_theta']),
    ({'rope_parameters': 'none'}, ['rope_parameters', 'object']), ({'lns_jax': 'folded'}, ['lns_jax', 'damaged'])])
def test_a_field_of_a_wrong_type_is_named(change, words, tmp_path):
  refused(folder('llama', tmp_path, **change), *words)


@pytest.mark.parametrize('text, words', [
    ('[' * 100_000, ['not JSON']), ('{"weight_map": null}', ['names no tensor']),
    ('{"weight_map": [1]}', ['names no tensor']),
    (json.dumps({'weight_map': {'a': 'x' * 5000}}), ['which is not there'])])
def test_an_index_that_is_none_is_refused(text, words, tmp_path):
  path = folder('llama', tmp_path)
  (path / 'model.safetensors.index.json').write_text(text)
  refused(path, 'index.json', *words)


@pytest.mark.parametrize('kind, dtype', [
    ('I8', np.int8), ('BOOL', np.bool_), ('I64', np.int64), ('F8_E4M3', ml_dtypes.float8_e4m3fn),
    ('F8_E5M2', ml_dtypes.float8_e5m2), ('C64', np.complex64)])
def test_numbers_that_are_no_weights_as_they_stand_are_refused(kind, dtype, tmp_path):
  path, name = folder('llama', tmp_path), 'model.layers.1.mlp.up_proj.weight'
  header, data = {}, b''
  for n, x in tensors('llama').items():
    bytes_ = x.astype(dtype if n == name else x.dtype).tobytes()
    header[n] = {'dtype': kind if n == name else 'F32', 'shape': x.shape,
                 'data_offsets': [len(data), len(data + bytes_)]}
    data += bytes_
  text = json.dumps(header).encode()
  (path / 'model.safetensors').write_bytes(len(text).to_bytes(8, 'little') + text + data)
  refused(path, name, kind)


@pytest.mark.parametrize('wrong', [np.nan, -np.inf])
def test_a_tensor_that_is_not_finite_is_named(wrong, tmp_path):
  have = tensors('gpt2')
  name = 'transformer.h.1.attn.c_attn.weight'
  have[name] = have[name].copy()
  have[name][3, 40] = wrong  # among the keys: one of the three parts of the tensor
  refused(write(tmp_path / 'bad', settings('gpt2'), [have]), name, 'NaN or infinity')


def test_numbers_that_a_narrower_type_does_not_hold_are_named(tmp_path):
  have = tensors('llama')
  have['model.norm.weight'] = have['model.norm.weight'] * 1e6
  path = write(tmp_path / 'large', settings('llama'), [have])
  lns_jax.load(path)
  refused(path, 'model.norm.weight', 'float16', dtype='float16')
