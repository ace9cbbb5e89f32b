"""A Hugging Face folder as a GGUF file, which llama.cpp and its like run, read again before it is there."""

import dataclasses
import json
import math

import numpy as np

from lns_jax import files
from lns_jax.config import ModelConfig
from lns_jax.errors import UserError, nearest
from lns_jax.interop import families, gguf, gguf_config, gguf_file, gguf_tokenizer, load, weights
from lns_jax.interop.fields import RECORD

# Our names of types: the library's name of a matrix's, and of the file's.
_KINDS = {'float32': ('F32', 'ALL_F32'), 'float16': ('F16', 'MOSTLY_F16'), 'bfloat16': ('BF16', 'MOSTLY_BF16'),
          'q8_0': ('Q8_0', 'MOSTLY_Q8_0')}
_ARCH = {'mistral': 'llama'}  # the others have their own names


def write(source, out, *, dtype: str = 'bfloat16') -> dict:
  """Writes a model as one GGUF file.

  Norms and biases stay float32, as llama.cpp has them; a matrix whose rows are no multiple of 32 numbers stays
  float16 in a file of q8_0.

  Args:
    source: Hugging Face folder (or .gguf file), such as `export` leaves.
    out: the file, which must not exist.
    dtype: of the matrices: float32, float16, bfloat16 or q8_0.

  Returns:
    {'out':, 'architecture':, 'dtype':, 'tensors':, 'bytes':}.

  Raises:
    UserError: `out` exists or cannot be written; GGUF has no name for the model, its tokenizer or one of its settings;
      or what is read again is not the model.
  """
  out = files.unused(out)
  gguf_file.library()
  if out.suffix != '.gguf':
    raise UserError(f'{out} does not end in .gguf.')
  if dtype not in _KINDS:
    raise UserError(f'dtype = {dtype!r} is not known.{nearest(dtype, _KINDS)}')
  if load.is_run(source):
    raise UserError(f'{source} is a run folder; export_hf.py --workdir={source} --out=FOLDER writes it as one that can '
                    'become a GGUF file.')
  if not files.absolute(source).exists():
    raise UserError(f'there is nothing at {source}; give a Hugging Face folder or a .gguf file.')
  opened = weights.open(source)
  config = ModelConfig(**families.of(opened.config, opened.path)[1])
  arch = _ARCH.get(opened.config['model_type'], opened.config['model_type'])
  if arch not in gguf_config.ARCHITECTURES:
    raise UserError(f'{opened.path} is of type {arch!r}, which is not known as GGUF.'
                    f'{nearest(arch, gguf_config.ARCHITECTURES)}')
  try:
    with files.whole_path(out) as partial:
      _write(opened, config, arch, partial, dtype)
      _check(opened, config, partial, dtype)
  except OSError as e:
    raise UserError(f'{out} could not be written: {e.strerror or e}; nothing is left of it.') from None
  return {'out': str(out), 'architecture': arch, 'dtype': dtype, 'tensors': len(opened.shapes),
          'bytes': out.stat().st_size}


def _write(opened: weights.Weights, config: ModelConfig, arch: str, path, dtype: str):
  import gguf as library
  writer = library.GGUFWriter(path, arch)
  writer.add_name(opened.path.stem)
  writer.add_file_type(library.LlamaFileType[_KINDS[dtype][1]])
  tokenizer = opened.tokenizer()
  values = {f'{arch}.{key}': value for key, value in _fields(config, arch).items()}
  values |= {} if tokenizer is None else gguf_tokenizer.fields(tokenizer, config.vocab_size)
  if RECORD in opened.config:
    values[gguf_config.KEY] = json.dumps(opened.config[RECORD])
  for key, value in values.items():
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}[type(value)]
    add(key, value)
  _tensors(writer, opened, config, arch, dtype)
  writer.close()


def _tensors(writer, opened: weights.Weights, config: ModelConfig, arch: str, dtype: str):
  """All names, shapes and types, then one tensor after the other."""
  from gguf import GGML_QUANT_SIZES, quants
  names, derived = {}, _derived(config)
  for name, shape in opened.shapes.items():
    stored = gguf.stored_name(arch, name)
    if stored is None:
      raise UserError(f'{opened.path} has a tensor {name} that architecture {arch} of GGUF has no name for.')
    names[name] = stored
    kind = _kind(shape[::-1] if gguf.is_transposed(arch, stored) else shape, dtype)
    block, size = GGML_QUANT_SIZES[kind]
    *rows, width = shape[::-1] if gguf.is_transposed(arch, stored) else shape
    packed = (*rows, width // block * size)
    writer.add_tensor_info(stored, packed, np.dtype(np.uint8), int(np.prod(packed)), raw_dtype=kind)
  for stored, array in derived.items():
    writer.add_tensor_info(stored, array.shape, array.dtype, array.nbytes)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for name, stored in names.items():
    array = _in_order(opened.get(name), config, arch, stored)
    writer.write_tensor_data(quants.quantize(array, _kind(array.shape, dtype)))
  for array in derived.values():
    writer.write_tensor_data(array)


def _kind(shape: tuple[int, ...], dtype: str):
  """The library's type of a tensor in a file of that type."""
  from gguf import GGMLQuantizationType as kinds
  if len(shape) == 1:
    return kinds.F32
  return kinds.F16 if dtype == 'q8_0' and shape[-1] % 32 else kinds[_KINDS[dtype][0]]


def _in_order(array: np.ndarray, config: ModelConfig, arch: str, stored: str) -> np.ndarray:
  """float32, matrices as [out, in], rows in the file's order."""
  array = np.ascontiguousarray(array.T if gguf.is_transposed(arch, stored) else array).astype(np.float32)
  heads = gguf.permuted_heads(arch, stored, config.num_heads, config.num_kv_heads)
  return np.ascontiguousarray(gguf.permute(array, heads)) if heads else array


def _fields(c: ModelConfig, arch: str) -> dict:
  """The fields under the architecture's name."""
  found = {'context_length': c.max_positions, 'embedding_length': c.d_model, 'block_count': c.num_layers,
           'feed_forward_length': c.d_ff, 'attention.head_count': c.num_heads, 'vocab_size': c.vocab_size}
  if 0 < c.sliding_window < c.max_positions:
    raise UserError(f'a model with a sliding window of {c.sliding_window} keys does not leave as GGUF: programs that '
                    f'read architecture {arch} know of no window.')
  if arch == 'gpt2':
    if c.mlp != 'gelu_tanh':
      raise UserError(f'a gpt2 with mlp = {c.mlp} does not leave as GGUF, where it is gelu_tanh.')
    return found | {'attention.layer_norm_epsilon': c.norm_eps}
  found |= {'attention.head_count_kv': c.num_kv_heads, 'attention.key_length': c.head_dim,
            'attention.value_length': c.head_dim, 'rope.dimension_count': c.head_dim, 'rope.freq_base': c.rope_base}
  if arch == 'olmo':
    clip = {'attention.clamp_kqv': c.clip_qkv} if c.clip_qkv else {}
    return found | _scaling(c) | clip | {'attention.layer_norm_epsilon': c.norm_eps}
  return found | _scaling(c) | {'attention.layer_norm_rms_epsilon': c.norm_eps}


def _scaling(c: ModelConfig) -> dict:
  """Fields of rotary scaling; llama3's is a tensor, see `_derived`."""
  s = c.rope_scaling
  if s.kind in ('none', 'llama3'):
    return {}
  odd = s.kind not in ('linear', 'yarn') or s.mscale or s.mscale_all_dim or not s.truncate
  if odd:
    raise UserError(f'rotary scaling of kind {s.kind} with these settings does not leave as GGUF; none, linear, llama3 '
                    'and yarn without mscale, mscale_all_dim and truncate = False do.')
  found = {'rope.scaling.type': s.kind, 'rope.scaling.factor': s.factor}
  if s.kind == 'linear':
    return found
  found |= {'rope.scaling.original_context_length': s.original_length, 'rope.scaling.yarn_beta_fast': s.beta_fast,
            'rope.scaling.yarn_beta_slow': s.beta_slow}
  usual = 0.1 * np.log(s.factor).item() + 1.0
  return found | ({'rope.scaling.attn_factor': s.attention_factor / usual} if s.attention_factor else {})


def _derived(c: ModelConfig) -> dict[str, np.ndarray]:
  """Tensors that only settings make."""
  s = c.rope_scaling
  if s.kind != 'llama3':
    return {}
  factors = gguf_config.llama3_factors(c.rope_base, c.head_dim, s.factor, s.low_freq_factor, s.high_freq_factor,
                                       s.original_length)
  return {'rope_freqs.weight': factors.astype(np.float32)}


def _said(c: ModelConfig) -> dict:
  """Settings as GGUF can say them: no window that no text is longer than, of Llama 3's scaling what it computes."""
  s = c.rope_scaling
  values = dataclasses.asdict(c) | {'sliding_window': 0, 'window_layers': ()}
  if s.kind in ('llama3', 'longrope'):
    factors = _derived(c).get('rope_freqs.weight', np.array(s.short_factor))
    return values | {'rope_scaling': tuple(factors.tolist())}
  s = s if s.kind == 'yarn' else dataclasses.replace(s, original_length=0)
  return values | {'rope_scaling': tuple(dataclasses.asdict(s).values())}


def _equal(a, b) -> bool:
  """As float32, which the file has."""
  if isinstance(a, tuple):
    return len(a) == len(b) and all(map(_equal, a, b))
  return math.isclose(a, b, rel_tol=1e-5) if isinstance(a, float) else a == b


def _check(opened: weights.Weights, config: ModelConfig, path, dtype: str):
  """Refuses a file that is not the model: other settings or tokens, or other numbers than the type rounds to."""
  again = gguf.GGUFWeights(path)
  read = ModelConfig(**families.of(again.config, path)[1])
  other = [name for name, value in _said(config).items() if not _equal(value, _said(read)[name])]
  if other:
    raise UserError(f'{opened.path} does not leave as GGUF: model.{other[0]} = {getattr(config, other[0])} read again '
                    f'is {getattr(read, other[0])}.')
  for name in opened.shapes:
    there, here = (np.asarray(w.get(name), np.float32) for w in (again, opened))
    close = {'float32': 0, 'float16': 2.0 ** -11, 'bfloat16': 2.0 ** -8, 'q8_0': 1 / 127}[dtype]
    if not np.isfinite(here).all():
      raise UserError(f'{opened.path}: tensor {name} has a number that is not finite.')
    if there.shape != here.shape or not np.abs(there - here).max() <= close * np.abs(here).max():
      raise UserError(f'{opened.path} does not leave as GGUF: tensor {name} read again is another.')
  tokenizer, found = opened.tokenizer(), again.tokenizer()
  text = 'The naïve café of 東京, 12345 times.\n\n  def f(x):\n\treturn x # 🙂'
  if tokenizer is not None and tokenizer.encode(text).tolist() != found.encode(text).tolist():
    raise UserError(f'{opened.path} does not leave as GGUF: its tokenizer read again gives other ids.')
