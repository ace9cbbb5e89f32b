"""Writes tiny GGUF files from the fixtures' weights, as llama.cpp's converter lays them out."""

import re

import gguf
import numpy as np

import hf_fixtures

ARCH = {'llama_gqa': 'llama', 'llama_mha_tied': 'llama', 'llama_mqa': 'llama', 'mistral': 'llama', 'qwen2': 'qwen2',
        'qwen3': 'qwen3', 'olmo': 'olmo', 'olmo2': 'olmo2'}
PERMUTED = ('llama', 'olmo')
NAMES = {
    'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output',
    'input_layernorm': 'attn_norm', 'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v', 'self_attn.o_proj': 'attn_output', 'self_attn.q_norm': 'attn_q_norm',
    'self_attn.k_norm': 'attn_k_norm', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
    'post_attention_layernorm': 'ffn_norm', 'post_feedforward_layernorm': 'post_ffw_norm'}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of each head in the order 0, h/2, 1, h/2 + 1, ...: number j of one half beside number j of the other."""
  h = len(rows) // heads
  order = [head * h + half * (h // 2) + j for head in range(heads) for j in range(h // 2) for half in (0, 1)]
  return rows[order]


def fields(name: str) -> dict:
  """{field without the architecture's name: value} of a fixture's model."""
  hf = hf_fixtures.fixture(name)[0]['config']
  found = {'block_count': hf['num_hidden_layers'], 'context_length': hf['max_position_embeddings'],
           'embedding_length': hf['hidden_size'], 'feed_forward_length': hf['intermediate_size'],
           'attention.head_count': hf['num_attention_heads'], 'attention.head_count_kv': hf['num_key_value_heads'],
           'rope.freq_base': float(hf['rope_theta']), 'vocab_size': hf['vocab_size']}
  if 'head_dim' in hf:
    found |= {'attention.key_length': hf['head_dim'], 'attention.value_length': hf['head_dim'],
              'rope.dimension_count': hf['head_dim']}
  if ARCH[name] == 'olmo':
    return found | {'attention.layer_norm_epsilon': 1e-5, 'attention.clamp_kqv': hf['clip_qkv']}
  if name == 'mistral':
    found['attention.sliding_window'] = hf['sliding_window']
  return found | {'attention.layer_norm_rms_epsilon': hf['rms_norm_eps']}


def tensors(name: str) -> dict[str, np.ndarray]:
  """{name in the file: array} of a fixture's model."""
  meta, arrays = hf_fixtures.fixture(name)
  found = {}
  for key, array in arrays.items():
    if not key.startswith('weight/'):
      continue
    layer, inner, kind = re.fullmatch(r'weight/(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)', key).groups()
    ours = NAMES[inner]
    if ARCH[name] == 'olmo2' and inner == 'post_attention_layernorm':
      ours = 'post_attention_norm'
    if ARCH[name] in PERMUTED and inner in ('self_attn.q_proj', 'self_attn.k_proj'):
      array = interleaved(array, meta['config'][f"num_{'attention' if '.q_' in inner else 'key_value'}_heads"])
    found[f"{'' if layer is None else f'blk.{layer}.'}{ours}.{kind}"] = array
  return found


def write(path, arch: str, values: dict, arrays: dict, *, kinds=None, **options):
  """A GGUF file. values: numbers, texts and lists by key, those without a section being the architecture's own."""
  writer = gguf.GGUFWriter(path, arch, **options)
  for key, value in values.items():
    key = key if key.split('.')[0] in ('tokenizer', 'general') else f'{arch}.{key}'
    if isinstance(value, (list, np.ndarray)):
      writer.add_array(key, list(value))
    else:
      {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
          key, value)
  for name, array in arrays.items():
    writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=(kinds or {}).get(name))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def write_fixture(path, name: str, **changes):
  """A fixture's model; `changes` to its fields, None takes one out."""
  values = {key: value for key, value in (fields(name) | changes).items() if value is not None}
  return write(path, ARCH[name], values, tensors(name))
