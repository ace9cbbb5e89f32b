"""A GGUF file's metadata as the fields of a Hugging Face config.json.

Every field under the architecture's name is honoured, known to change nothing, or refused by name.
"""

import json

import numpy as np

from lns_jax.errors import UserError, nearest
from lns_jax.interop.families import FAMILIES
from lns_jax.interop.fields import LARGEST, RECORD

ARCHITECTURES = ('llama', 'qwen2', 'qwen3', 'gpt2', 'olmo', 'olmo2')
KEY = 'lns_jax.record'  # holds the field RECORD of a config.json, as JSON
_NO_DEFAULT = object()


class _Fields:
  """The fields under the architecture's name; each is taken once, and what is left is refused."""

  def __init__(self, path, metadata: dict):
    self.path, self.arch = path, metadata['general.architecture']
    self._left = {key.removeprefix(f'{self.arch}.'): value for key, value in metadata.items()
                  if key.startswith(f'{self.arch}.')}

  def take(self, key: str, default=_NO_DEFAULT):
    """A field's value, a float as its shortest float32; one value for all layers where they are equal."""
    if key not in self._left and default is _NO_DEFAULT:
      raise UserError(f'{self.path} lacks the field {self.arch}.{key}.')
    value = self._left.pop(key, default)
    if isinstance(value, np.ndarray):
      if not len(value) or (value != value[0]).any():
        self.refuse(key, value.tolist(), 'layers that differ in it are not known')
      value = value[0].item()
    return float(str(np.float32(value))) if isinstance(value, float) else value

  def count(self, key: str, default=_NO_DEFAULT) -> int:
    """Takes a field that is a whole number above 0."""
    value = self.take(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
      self.refuse(key, value, f'it must be a whole number from 1 to {LARGEST}')
    return value

  def number(self, key: str, default=_NO_DEFAULT) -> float | None:
    """Takes a field that is a number above 0, or missing where the default is None."""
    value = self.take(key, default)
    if value is default is None:
      return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float('inf'):
      self.refuse(key, value, 'it must be a number above 0')
    return float(value)

  def only(self, key: str, *allowed):
    """Takes a field that may be missing or have one of some values."""
    value = self.take(key, allowed[0])
    if value not in allowed:
      self.refuse(key, value, f'of it only {" or ".join(map(str, allowed))} is known')

  def refuse(self, key: str, value, why: str):
    raise UserError(f'{self.path} has {self.arch}.{key} = {value}: {why}.')

  def finish(self):
    for key, value in self._left.items():
      shown = str(value)
      self.refuse(key, shown if len(shown) <= 60 else shown[:57] + '...', 'that field is not known and may change '
                  'what the model computes')


def to_config(path, file) -> dict:
  """config.json of a `gguf_file.File`.

  Raises:
    UserError: an architecture or field that is not known, or a field that is missing.
  """
  arch = file.metadata.get('general.architecture')
  if not isinstance(arch, str) or arch not in ARCHITECTURES:
    near = nearest(str(arch), ARCHITECTURES)
    raise UserError(f'{path} is of architecture {arch!r}, which is not known as GGUF.{near}')
  if 'token_embd.weight' not in file.tensors:
    raise UserError(f'{path} holds no tensor token_embd.weight.')
  fields = _Fields(path, file.metadata)
  config = (_gpt2 if arch == 'gpt2' else _llama_like)(fields, file)
  for key, allowed in {'expert_count': (0,), 'expert_used_count': (0,), 'use_parallel_residual': (False,),
                       'attention.causal': (True,), 'attention.max_alibi_bias': (0.0,), 'logit_scale': (1.0, 0.0),
                       'residual_scale': (1.0, 0.0), 'embedding_scale': (1.0, 0.0),
                       'tensor_data_layout': ('Meta AI original pth',), 'vocab_size': (config['vocab_size'],)}.items():
    fields.only(key, *allowed)
  fields.finish()
  if KEY in file.metadata:  # of an export of ours
    config[RECORD] = _record(path, file.metadata[KEY])
  for name in ('bos', 'eos'):
    given = file.metadata.get(f'tokenizer.ggml.{name}_token_id')
    config[f'{name}_token_id'] = given if isinstance(given, int) else None
  return config | {'architectures': [FAMILIES[config['model_type']].architecture], 'tie_word_embeddings': _tied(file)}


def _record(path, text) -> dict:
  try:
    found = json.loads(text)
  except (TypeError, ValueError, RecursionError):
    found = None
  if not isinstance(found, dict):
    raise UserError(f'{path}: the record {KEY} of what was folded into the weights is damaged; convert the model '
                    'again.')
  return found


def _tied(file) -> bool:
  """No head of its own; of GPT-2 also the embedding's bytes again, as older conversions wrote it."""
  head, table = file.tensors.get('output.weight'), file.tensors['token_embd.weight']
  return head is None or (file.metadata['general.architecture'] == 'gpt2' and head.kind == table.kind
                          and np.array_equal(head.data, table.data))


def _gpt2(fields: _Fields, file) -> dict:
  width = fields.count('embedding_length')
  return {
      'model_type': 'gpt2', 'vocab_size': file.tensors['token_embd.weight'].shape[0], 'n_embd': width,
      'n_layer': fields.count('block_count'), 'n_head': fields.count('attention.head_count'),
      'n_inner': fields.count('feed_forward_length', 4 * width), 'n_positions': fields.count('context_length'),
      'layer_norm_epsilon': fields.number('attention.layer_norm_epsilon'), 'activation_function': 'gelu_new'}


def _llama_like(fields: _Fields, file) -> dict:
  """Llama, and those that differ from it in norms, biases or windows."""
  arch, width, heads = fields.arch, fields.count('embedding_length'), fields.count('attention.head_count')
  head_dim = fields.count('attention.key_length', width // heads)
  base, length = fields.number('rope.freq_base', 10000.0), fields.count('context_length')
  config = {
      'model_type': arch, 'vocab_size': file.tensors['token_embd.weight'].shape[0], 'hidden_size': width,
      'intermediate_size': fields.count('feed_forward_length'), 'num_hidden_layers': fields.count('block_count'),
      'num_attention_heads': heads, 'num_key_value_heads': fields.count('attention.head_count_kv', heads),
      'head_dim': head_dim, 'max_position_embeddings': length, 'hidden_act': 'silu',
      'rope_theta': base, 'rope_scaling': _rope_scaling(fields, file, base, head_dim, length)}
  for key in ('attention.value_length', 'rope.dimension_count'):
    fields.only(key, head_dim)
  if arch == 'olmo':  # its class has no setting for the epsilon
    fields.only('attention.layer_norm_epsilon', 1e-5)
    return config | {'clip_qkv': fields.number('attention.clamp_kqv', None)}
  config['rms_norm_eps'] = fields.number('attention.layer_norm_rms_epsilon')
  if arch == 'llama':
    config['mlp_bias'] = 'blk.0.ffn_up.bias' in file.tensors
    window = fields.number('attention.sliding_window', None)
    if window:
      config |= {'model_type': 'mistral', 'sliding_window': int(window)}
  if arch == 'qwen2':
    return config | {'use_sliding_window': False}
  return config | {'attention_bias': 'blk.0.attn_q.bias' in file.tensors}


def _rope_scaling(fields: _Fields, file, base: float, head_dim: int, length: int) -> dict | None:
  """rope_scaling of a config.json, None for plain rotary positions."""
  linear = fields.number('rope.scale_linear', 1.0)  # what files had before there were types
  kind, factor = fields.take('rope.scaling.type', 'linear'), fields.number('rope.scaling.factor', linear)
  fields.take('rope.scaling.finetuned', None)
  original, attention = (
      fields.number(f'rope.scaling.{key}', None) for key in ('original_context_length', 'attn_factor'))
  betas = {b: fields.number(f'rope.scaling.yarn_{b}', None) for b in ('beta_fast', 'beta_slow')}
  plain = kind == 'none' or factor == 1.0
  if 'rope_freqs.weight' in file.tensors:
    if not plain:
      fields.refuse('rope.scaling.type', kind, 'rope_freqs.weight beside it is not known')
    return _from_factors(file.tensors['rope_freqs.weight'].read().astype(np.float64), base, head_dim, length)
  if plain or kind == 'linear':
    return None if plain else {'rope_type': 'linear', 'factor': factor}
  if kind != 'yarn':
    fields.refuse('rope.scaling.type', kind, 'of it only none, linear and yarn are known')
  found = {'rope_type': 'yarn', 'factor': factor, **betas,
           'original_max_position_embeddings': original and int(original),
           'attention_factor': attention and attention * (0.1 * np.log(factor).item() + 1.0)}
  return {key: value for key, value in found.items() if value is not None}


def llama3_factors(base: float, head_dim: int, factor: float, low: float, high: float, original: float) -> np.ndarray:
  """What Llama 3's scaling divides each of the h/2 frequencies by."""
  turns = original * base ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # over the original length
  return 1 / ((1 - np.clip((turns - low) / (high - low), 0, 1)) * (1 / factor - 1) + 1)


def _from_factors(factors: np.ndarray, base: float, head_dim: int, length: int) -> dict | None:
  """rope_scaling that divides frequency i by factors[i]: Llama 3's where its formula gives them.

  Converters write the factors and not the settings they came from. Between its two bounds the formula is linear in the
  frequency, and only ratios of its settings matter, so that low_freq_factor = 1 loses nothing. Factors that it does
  not give are written as longrope's, which have no formula.
  """
  if np.allclose(factors, 1, rtol=1e-6):
    return None
  factor = factors.max().item()
  smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
  inside = (smooth > 1e-4) & (smooth < 1 - 1e-4)
  guesses = [(4.0, 8192)]  # as published
  if inside.sum() > 1:
    slope, start = np.polyfit(base ** (-np.arange(0, head_dim, 2) / head_dim)[inside] / (2 * np.pi), smooth[inside], 1)
    guesses.append((round(1 - 1 / start, 3), round(-slope / start)))
  for high, original in guesses:
    if np.allclose(llama3_factors(base, head_dim, factor, 1.0, high, original), factors, rtol=1e-4):
      return {'rope_type': 'llama3', 'factor': factor, 'low_freq_factor': 1.0, 'high_freq_factor': high,
              'original_max_position_embeddings': original}
  return {'rope_type': 'longrope', 'factor': 1.0, 'attention_factor': 1.0, 'short_factor': factors.tolist(),
          'long_factor': factors.tolist(), 'original_max_position_embeddings': length}
