"""A model in a GGUF file is the model that it was made from."""

import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_fixtures
import hf_folders
from gguf_files import ARCH, fields, tensors, write, write_fixture
from lns_jax.config import ModelConfig
from lns_jax.data import tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import gguf as ours
from lns_jax.interop import families, gguf_file, gguf_write, load
from lns_jax.models import transformer


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'model.gguf'


@pytest.mark.parametrize('name', ['llama_gqa', 'mistral', 'olmo'])
def test_logits_of_a_file_are_those_of_transformers(name, path):
  config, params, tokenizer = load.load(write_fixture(path, name))
  reference = hf_fixtures.fixture(name)[1]
  assert tokenizer is None
  logits = jax.jit(lambda params: transformer.forward(config, params, reference['tokens']))(params)
  np.testing.assert_allclose(logits, reference['logits'], **hf_fixtures.CLOSE)


@pytest.mark.parametrize('name', ARCH)
def test_config_and_tensors_of_a_file_are_those_of_transformers(name, path):
  weights = ours.GGUFWeights(write_fixture(path, name))
  meta, arrays = hf_fixtures.fixture(name)
  expected = {key: value for key, value in meta['config'].items() if key in weights.config}
  assert weights.config == weights.config | expected
  assert {'rope_theta', 'tie_word_embeddings', 'num_key_value_heads', 'max_position_embeddings'} <= set(expected)
  assert weights.config['model_type'] == name.split('_')[0]
  stored = {key.removeprefix('weight/'): a for key, a in arrays.items() if key.startswith('weight/')}
  assert weights.shapes == {key: a.shape for key, a in stored.items()}
  for key, a in stored.items():
    np.testing.assert_array_equal(weights.get(key), a, err_msg=key)


def test_the_orders_of_a_head_of_eight_rows():
  # known fault I1
  rows = np.arange(8)
  assert ours.unpermute(rows, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
  assert ours.permute(rows, 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
  two = np.arange(16.0).reshape(16, 1)
  assert ours.unpermute(two, 2)[8:, 0].tolist() == [8, 10, 12, 14, 9, 11, 13, 15]
  np.testing.assert_array_equal(ours.permute(ours.unpermute(two, 2), 2), two)


def test_biases_of_permuted_projections_are_put_back(path):
  arrays = tensors('llama_gqa')
  arrays |= {'blk.0.attn_q.bias': np.arange(48, dtype=np.float32), 'blk.0.attn_v.bias': np.arange(24, dtype=np.float32)}
  weights = ours.GGUFWeights(write(path, 'llama', fields('llama_gqa'), arrays))
  assert weights.config['attention_bias'] and not weights.config['mlp_bias']
  bias = weights.get('model.layers.0.self_attn.q_proj.bias')
  assert bias[:12].tolist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11] and bias[12] == 12
  assert weights.get('model.layers.0.self_attn.v_proj.bias').tolist() == list(range(24))


def test_gpt2_matrices_are_in_by_out_as_its_class_has_them(path):
  D, rng = 6, np.random.default_rng(0)
  arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {
      'token_embd.weight': (11, D), 'position_embd.weight': (5, D), 'output_norm.weight': (D,),
      'output_norm.bias': (D,),
      'blk.0.attn_norm.weight': (D,), 'blk.0.attn_norm.bias': (D,), 'blk.0.attn_qkv.weight': (3 * D, D),
      'blk.0.attn_qkv.bias': (3 * D,), 'blk.0.attn_output.weight': (D, D), 'blk.0.attn_output.bias': (D,),
      'blk.0.ffn_norm.weight': (D,), 'blk.0.ffn_norm.bias': (D,), 'blk.0.ffn_up.weight': (4 * D, D),
      'blk.0.ffn_up.bias': (4 * D,), 'blk.0.ffn_down.weight': (D, 4 * D), 'blk.0.ffn_down.bias': (D,)}.items()}
  arrays['output.weight'] = arrays['token_embd.weight']  # as older conversions wrote the tied head
  values = {'block_count': 1, 'context_length': 5, 'embedding_length': D, 'feed_forward_length': 4 * D,
            'attention.head_count': 2, 'attention.layer_norm_epsilon': 1e-5}
  weights = ours.GGUFWeights(write(path, 'gpt2', values, arrays))
  assert weights.config == {
      'model_type': 'gpt2', 'architectures': ['GPT2LMHeadModel'], 'vocab_size': 11, 'n_embd': D, 'n_layer': 1,
      'n_head': 2, 'n_inner': 4 * D, 'n_positions': 5, 'layer_norm_epsilon': 1e-5, 'activation_function': 'gelu_new',
      'tie_word_embeddings': True, 'bos_token_id': None, 'eos_token_id': None}
  at = 'transformer.h.0'
  assert weights.shapes == {
      'transformer.wte.weight': (11, D), 'transformer.wpe.weight': (5, D), 'transformer.ln_f.weight': (D,),
      'transformer.ln_f.bias': (D,), f'{at}.ln_1.weight': (D,), f'{at}.ln_1.bias': (D,),
      f'{at}.attn.c_attn.weight': (D, 3 * D), f'{at}.attn.c_attn.bias': (3 * D,), f'{at}.attn.c_proj.weight': (D, D),
      f'{at}.attn.c_proj.bias': (D,), f'{at}.ln_2.weight': (D,), f'{at}.ln_2.bias': (D,),
      f'{at}.mlp.c_fc.weight': (D, 4 * D), f'{at}.mlp.c_fc.bias': (4 * D,), f'{at}.mlp.c_proj.weight': (4 * D, D),
      f'{at}.mlp.c_proj.bias': (D,)}
  for theirs, name in (('attn.c_attn', 'attn_qkv'), ('attn.c_proj', 'attn_output'), ('mlp.c_fc', 'ffn_up')):
    np.testing.assert_array_equal(weights.get(f'{at}.{theirs}.weight'), arrays[f'blk.0.{name}.weight'].T)


def test_a_head_of_its_own_is_kept(path):
  arrays = tensors('llama_mha_tied')
  assert ours.GGUFWeights(write(path, 'llama', fields('llama_mha_tied'), arrays)).config['tie_word_embeddings']
  arrays['output.weight'] = arrays['token_embd.weight'] + 1
  weights = ours.GGUFWeights(write(path, 'llama', fields('llama_mha_tied'), arrays))
  assert not weights.config['tie_word_embeddings']
  np.testing.assert_array_equal(weights.get('lm_head.weight'), arrays['output.weight'])


def llama3_factors(base, head_dim, factor, low, high, original):
  """As the converter writes them, by Llama 3's definition: by wavelength, long ones divided, a ramp between."""
  found = []
  for i in range(0, head_dim, 2):
    wavelength = 2 * np.pi * base ** (i / head_dim)
    if wavelength < original / high:
      found.append(1)
    elif wavelength > original / low:
      found.append(factor)
    else:
      smooth = (original / wavelength - low) / (high - low)
      found.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(found, np.float32)


@pytest.mark.parametrize('base, head_dim, settings', [
    (5e5, 128, (8.0, 1.0, 4.0, 8192)), (5e5, 64, (32.0, 1.0, 4.0, 8192)), (1e4, 64, (16.0, 1.0, 2.5, 2000))])
def test_llama3_scaling_comes_back_from_its_factors(base, head_dim, settings, path):
  changed = fields('llama_gqa') | {'rope.freq_base': base, 'attention.key_length': head_dim,
                                   'attention.value_length': head_dim, 'rope.dimension_count': head_dim}
  factors = llama3_factors(base, head_dim, *settings)
  weights = ours.GGUFWeights(write(path, 'llama', changed, tensors('llama_gqa') | {'rope_freqs.weight': factors}))
  factor, low, high, original = settings
  assert weights.config['rope_scaling'] == {'rope_type': 'llama3', 'factor': factor, 'low_freq_factor': low,
                                            'high_freq_factor': high, 'original_max_position_embeddings': original}
  assert 'rope_freqs.weight' not in weights.shapes and len(weights.shapes) == len(tensors('llama_gqa'))


def test_factors_of_no_formula_are_kept_one_by_one(path):
  factors = np.array([1, 3, 2, 5, 4, 6], np.float32)
  weights = ours.GGUFWeights(write(path, 'llama', fields('llama_gqa'),
                                   tensors('llama_gqa') | {'rope_freqs.weight': factors}))
  scaling = weights.config['rope_scaling']
  assert scaling['rope_type'] == 'longrope' and scaling['attention_factor'] == 1
  assert scaling['short_factor'] == scaling['long_factor'] == factors.tolist()


@pytest.mark.parametrize('changes, scaling', [
    ({}, None),
    ({'rope.scaling.type': 'none', 'rope.scaling.factor': 4.0}, None),
    ({'rope.scaling.type': 'linear', 'rope.scaling.factor': 4.0}, {'rope_type': 'linear', 'factor': 4.0}),
    ({'rope.scale_linear': 2.0}, {'rope_type': 'linear', 'factor': 2.0}),
    ({'rope.scaling.type': 'yarn', 'rope.scaling.factor': 4.0, 'rope.scaling.original_context_length': 32,
      'rope.scaling.yarn_beta_fast': 16.0},
     {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32, 'beta_fast': 16.0}),
])
def test_rope_scaling_by_fields(changes, scaling, path):
  assert ours.GGUFWeights(write_fixture(path, 'llama_gqa', **changes)).config['rope_scaling'] == scaling


def blocks_by_hand():
  """{kind: (bytes of one block of 32, its values)}, from the definition of each."""
  scale, low = np.float16(0.5), np.float16(-3)
  q8, q4 = np.arange(-16, 16, dtype=np.int8), np.arange(32) % 16
  packed = (q4[:16] | q4[16:] << 4).astype(np.uint8)  # the first half in the low four bits
  return {'Q8_0': (scale.tobytes() + q8.tobytes(), 0.5 * q8),
          'Q4_0': (scale.tobytes() + packed.tobytes(), 0.5 * (q4 - 8)),
          'Q4_1': (scale.tobytes() + low.tobytes() + packed.tobytes(), 0.5 * q4 - 3)}


@pytest.mark.parametrize('kind', ['Q8_0', 'Q4_0', 'Q4_1'])
def test_blocks_become_numbers_by_their_definition(kind):
  block, values = blocks_by_hand()[kind]
  data = np.frombuffer(block * 6, np.uint8).reshape(3, -1)
  tensor = gguf_file.Tensor((3, 64), gguf.GGMLQuantizationType[kind], data)
  np.testing.assert_array_equal(tensor.read(), np.tile(values, (3, 2)))
  assert tensor.read().dtype == np.float32


@pytest.mark.parametrize('kind', ['Q2_K', 'Q3_K', 'Q4_K', 'Q5_K', 'Q6_K', 'Q5_0', 'Q5_1', 'IQ4_XS'])
def test_other_kinds_are_as_the_library_has_them(kind, monkeypatch):
  monkeypatch.setattr(gguf_file, '_CHUNK', 3 * 512)  # three rows at a time
  kind = gguf.GGMLQuantizationType[kind]
  block, size = gguf.GGML_QUANT_SIZES[kind]
  data = np.random.default_rng(0).integers(0, 60, (7, 512 // block * size)).astype(np.uint8)
  tensor = gguf_file.Tensor((7, 512), kind, data)
  np.testing.assert_array_equal(tensor.read(), gguf.quants.dequantize(data, kind))


def test_floats_come_as_stored(path):
  arrays = tensors('llama_gqa')
  table = arrays['token_embd.weight']
  as_bf16 = table.astype(jnp.bfloat16)
  for stored, kind in ((table.astype(np.float16), None), (as_bf16.view(np.uint8), gguf.GGMLQuantizationType.BF16)):
    weights = ours.GGUFWeights(write(path, 'llama', fields('llama_gqa'), arrays | {'token_embd.weight': stored},
                                     kinds={'token_embd.weight': kind}))
    found = weights.get('model.embed_tokens.weight')
    assert found.shape == weights.shapes['model.embed_tokens.weight'] == table.shape
    assert found.dtype == (np.float16 if kind is None else jnp.bfloat16)
    np.testing.assert_array_equal(found, table.astype(found.dtype))


def test_one_tensor_is_held_at_a_time(path):
  quantised = gguf.quants.quantize(np.ones((8192, 512), np.float32), gguf.GGMLQuantizationType.Q8_0)
  weights = ours.GGUFWeights(write(path, 'llama', fields('llama_gqa') | {'vocab_size': 8192},
                                   {'token_embd.weight': quantised},
                                   kinds={'token_embd.weight': gguf.GGMLQuantizationType.Q8_0}))
  tracemalloc.start()
  assert weights.get('model.embed_tokens.weight').nbytes == 8192 * 512 * 4
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 2 * 8192 * 512 * 4  # a few chunks beside the result


def test_a_model_in_several_files(tmp_path):
  whole = ours.GGUFWeights(write_fixture(tmp_path / 'whole.gguf', 'llama_gqa'))
  write(tmp_path / 'm.gguf', 'llama', fields('llama_gqa'), tensors('llama_gqa'), split_max_tensors=12)
  files = sorted(tmp_path.glob('m-*.gguf'))
  assert [f.name for f in files] == [f'm-{i:05d}-of-00003.gguf' for i in (1, 2, 3)]
  parts = ours.GGUFWeights(files[0])
  assert parts.config == whole.config and parts.shapes == whole.shapes
  for name in whole.shapes:
    np.testing.assert_array_equal(parts.get(name), whole.get(name))
  with pytest.raises(UserError, match=r'm-00002-of-00003.gguf.*give the first'):
    ours.GGUFWeights(files[1])
  files[2].unlink()
  with pytest.raises(UserError, match='m-00003-of-00003.gguf is not a file'):
    ours.GGUFWeights(files[0])


def test_a_file_cut_anywhere_is_refused_in_a_sentence(path):
  data = write_fixture(path, 'llama_mha_tied').read_bytes()
  assert ours.GGUFWeights(path)
  for size in [*range(0, 1200, 7), *range(1200, len(data) - 32, 997)]:  # the last tensor is padded to 32 bytes
    path.write_bytes(data[:size])
    with pytest.raises(UserError) as error:
      ours.GGUFWeights(path)
    assert str(path) in str(error.value) and '\n' not in str(error.value)


def test_a_length_beyond_the_file_is_named(path):
  data = bytearray(write_fixture(path, 'llama_mha_tied').read_bytes())
  data[24:32] = (2 ** 62).to_bytes(8, 'little')  # of the first key, after letters, version and two counts
  path.write_bytes(data)
  with pytest.raises(UserError, match=f'{2 ** 62} bytes are said to follow byte 32'):
    ours.GGUFWeights(path)


def test_damaged_counts_do_not_become_work(path):
  data = write_fixture(path, 'llama_mha_tied').read_bytes()
  for at in range(4, 600):
    path.write_bytes(data[:at] + b'\xff\xff\xff\x7f' + data[at + 4:])
    try:
      ours.GGUFWeights(path)
    except UserError as error:
      assert '\n' not in str(error)


@pytest.mark.parametrize('changes, words', [
    ({'expert_count': 8}, 'llama.expert_count = 8'),
    ({'attention.scale': 0.5}, 'llama.attention.scale = 0.5'),
    ({'some.new.thing': 'yes'}, 'llama.some.new.thing = yes'),
    ({'rope.dimension_count': 6}, 'llama.rope.dimension_count = 6'),
    ({'rope.scaling.type': 'longrope', 'rope.scaling.factor': 2.0}, 'llama.rope.scaling.type = longrope'),
    ({'attention.head_count': [4, 4, 2]}, r'llama.attention.head_count = \[4, 4, 2\]'),
    ({'attention.head_count': 0}, 'llama.attention.head_count = 0'),
    ({'block_count': 'three'}, 'llama.block_count = three'),
    ({'attention.layer_norm_rms_epsilon': None}, 'lacks the field llama.attention.layer_norm_rms_epsilon'),
])
def test_fields_that_change_the_maths_are_refused_by_name(changes, words, path):
  with pytest.raises(UserError, match=words):
    ours.GGUFWeights(write_fixture(path, 'llama_gqa', **changes))


def test_equal_numbers_of_all_layers_are_one(path):
  weights = ours.GGUFWeights(write_fixture(path, 'llama_gqa', feed_forward_length=[40, 40, 40]))
  assert weights.config['intermediate_size'] == 40


def test_mistakes_are_one_sentence(path, tmp_path):
  text = tmp_path / 'text.gguf'
  text.write_text('no model')
  arrays = tensors('llama_gqa')
  for call, words in (
      (lambda: ours.GGUFWeights(tmp_path / 'none.gguf'), ['none.gguf', 'not a file']),
      (lambda: ours.GGUFWeights(text), ['text.gguf', 'not a GGUF file']),
      (lambda: ours.GGUFWeights(write(path, 'falcon', {}, arrays)), ["'falcon'", 'llama']),
      (lambda: ours.GGUFWeights(write(path, 'llama', fields('llama_gqa'), {'output.weight': arrays['output.weight']})),
       ['token_embd.weight']),
      (lambda: ours.GGUFWeights(write(path, 'llama', fields('llama_gqa'),
                                      arrays | {'blk.0.ffn_gate_exps.weight': arrays['output.weight']})),
       ['blk.0.ffn_gate_exps.weight', 'llama']),
      (lambda: ours.GGUFWeights(write_fixture(path, 'llama_gqa')).get('lm_head.bias'), ['lm_head.bias'])):
    with pytest.raises(UserError) as error:
      call()
    assert all(w in str(error.value) for w in words) and '\n' not in str(error.value), error.value


ODD = ['x', '', -1, 0, 1.5, 2**40, float('nan'), True, [], ['a'], np.array([1, 2], np.int32)]


@pytest.mark.parametrize('name', ['gpt2', 'llama_rope_yarn', 'llama_rope_llama3'])
def test_metadata_of_any_value_is_understood_or_refused(name, tmp_path, monkeypatch):
  """Whatever the format can hold, in every field that there is, is a model or one sentence."""
  config = hf_folders.settings(name)
  tokenizer = tokenizers.byte_tokenizer()
  config['vocab_size'] = tokenizer.vocab_size
  found, rng = hf_folders.tensors(name), np.random.default_rng(0)
  for table in [n for n, x in found.items() if n.endswith(('wte.weight', 'lm_head.weight', 'embed_tokens.weight'))]:
    found[table] = rng.standard_normal((tokenizer.vocab_size, found[table].shape[1])).astype(np.float32)
  folder = hf_folders.write(tmp_path / 'hf', config, [found])
  tokenizer.save(folder)
  gguf_write.write(folder, tmp_path / 'm.gguf')
  right = gguf_file.read(tmp_path / 'm.gguf')
  for key in (*right.metadata, 'lns_jax.record', 'tokenizer.ggml.merges', 'tokenizer.ggml.eot_token_id'):
    for value in ODD:
      changed = right._replace(metadata=right.metadata | {key: value})
      monkeypatch.setattr(gguf_file, 'read', lambda path, changed=changed: changed)
      try:
        opened = ours.GGUFWeights(tmp_path / 'm.gguf')
        ModelConfig(**families.of(opened.config, opened.path)[1])
        opened.tokenizer()
      except UserError as error:
        assert '\n' not in str(error), (key, value)
