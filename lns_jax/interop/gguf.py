"""A GGUF file as Hugging Face weights: their names, shapes and orders of rows.

llama.cpp rotates neighbouring numbers of a head, Hugging Face numbers half a head apart. For the architectures in
`_PERMUTED` its converter therefore stores the rows of Q and K of a head in the order 0, h/2, 1, h/2 + 1, ...; here
they go back (known fault I1). For the others it rotates as Hugging Face does and the rows are as they were.
"""

import functools
import pathlib
import re

import numpy as np

from lns_jax.errors import UserError
from lns_jax.interop import gguf_config, gguf_file, gguf_tokenizer
from lns_jax.interop.weights import Weights

_OUTER = {'token_embd.weight': 'model.embed_tokens.weight', 'output_norm.weight': 'model.norm.weight',
          'output.weight': 'lm_head.weight'}
_INNER = {'attn_norm': 'input_layernorm', 'ffn_norm': 'post_attention_layernorm',
          'attn_q': 'self_attn.q_proj', 'attn_k': 'self_attn.k_proj', 'attn_v': 'self_attn.v_proj',
          'attn_output': 'self_attn.o_proj', 'attn_q_norm': 'self_attn.q_norm', 'attn_k_norm': 'self_attn.k_norm',
          'ffn_gate': 'mlp.gate_proj', 'ffn_up': 'mlp.up_proj', 'ffn_down': 'mlp.down_proj',
          'post_attention_norm': 'post_attention_layernorm', 'post_ffw_norm': 'post_feedforward_layernorm'}
_GPT2_OUTER = {'token_embd.weight': 'transformer.wte.weight', 'position_embd.weight': 'transformer.wpe.weight',
               'output_norm.weight': 'transformer.ln_f.weight', 'output_norm.bias': 'transformer.ln_f.bias',
               'output.weight': 'lm_head.weight'}
_GPT2_INNER = {'attn_norm': 'ln_1', 'attn_qkv': 'attn.c_attn', 'attn_output': 'attn.c_proj', 'ffn_norm': 'ln_2',
               'ffn_up': 'mlp.c_fc', 'ffn_down': 'mlp.c_proj'}
# GPT-2's class keeps its matrices as [in, out]; GGUF has all as [out, in].
_GPT2_TRANSPOSED = ('attn_qkv.weight', 'attn_output.weight', 'ffn_up.weight', 'ffn_down.weight')
_PERMUTED = ('llama', 'olmo')
# Two norms have one name at Hugging Face: OLMo 2 has the one after attention, the others the one before the MLP.
_OLMO2_NAMES = ('post_attention_norm', 'post_ffw_norm')
# Computed from the settings, which the config has.
_DERIVED = re.compile(r'rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight')


def stored_name(arch: str, name: str) -> str | None:
  """What a GGUF file of that architecture calls a tensor of Hugging Face's name; None: nothing."""
  gpt2 = arch == 'gpt2'
  outer, inner = (_GPT2_OUTER, _GPT2_INNER) if gpt2 else (_OUTER, _INNER)
  back = {theirs: ours for ours, theirs in outer.items()}
  if name in back:
    return back[name]
  back = {theirs: ours for ours, theirs in inner.items() if (ours in _OLMO2_NAMES) <= (arch == 'olmo2')}
  found = re.fullmatch(rf"{'transformer.h' if gpt2 else 'model.layers'}\.(\d+)\.([\w.]+)\.(weight|bias)", name)
  return f'blk.{found[1]}.{back[found[2]]}.{found[3]}' if found and found[2] in back else None


def is_transposed(arch: str, stored: str) -> bool:
  """Whether Hugging Face has a tensor of a file the other way around."""
  return arch == 'gpt2' and stored.endswith(_GPT2_TRANSPOSED)


def permuted_heads(arch: str, stored: str, heads: int, kv_heads: int) -> int:
  """Over how many heads the rows of a tensor of a file are in another order; 0: they are not."""
  part = re.search(r'\.attn_([qk])\.', stored)
  return (heads if part[1] == 'q' else kv_heads) if part and arch in _PERMUTED else 0


class GGUFWeights(Weights):
  """A .gguf file, or the first of several that one was split into.

  Raises:
    UserError: at opening: not a GGUF file, damaged, of an architecture or with a field or tensor that is not known.
  """

  def __init__(self, path):
    self.path = pathlib.Path(path)
    file = gguf_file.read(self.path)
    self._metadata = file.metadata
    self.config = gguf_config.to_config(self.path, file)
    tied = self.config['tie_word_embeddings']
    self._tensors = {self._name(name): (name, tensor) for name, tensor in file.tensors.items()
                     if not _DERIVED.fullmatch(name) and not (tied and name == 'output.weight')}
    self.shapes = {name: t.shape[::-1] if is_transposed(self._arch, inner) else t.shape
                   for name, (inner, t) in self._tensors.items()}

  @property
  def _arch(self) -> str:
    return self._metadata['general.architecture']

  def _name(self, name: str) -> str:
    """Hugging Face's name of a tensor of the file."""
    gpt2 = self._arch == 'gpt2'
    outer, inner = (_GPT2_OUTER, _GPT2_INNER) if gpt2 else (_OUTER, _INNER)
    if name in outer:
      return outer[name]
    found = re.fullmatch(r'blk\.(\d+)\.(\w+)\.(weight|bias)', name)
    if not found or found[2] not in inner:
      raise UserError(f'{self.path} holds a tensor {name}, which architecture {self._arch} is not known to have.')
    return f"{'transformer.h' if gpt2 else 'model.layers'}.{found[1]}.{inner[found[2]]}.{found[3]}"

  def get(self, name: str) -> np.ndarray:
    """One tensor: as stored where it is of floats, float32 where it was quantised.

    Raises:
      UserError: there is no such tensor, or it is packed in a way that the gguf library cannot undo.
    """
    if name not in self._tensors:
      raise UserError(f'{self.path} holds no tensor {name}.')
    inner, tensor = self._tensors[name]
    try:
      array = tensor.read()
    except NotImplementedError:
      raise UserError(f'{self.path}: tensor {inner} is of type {tensor.kind.name}, which the gguf library cannot turn '
                      'into numbers.') from None
    if is_transposed(self._arch, inner):
      return array.T
    heads = permuted_heads(self._arch, inner, *(self.config.get(f'num_{n}_heads') for n in ('attention', 'key_value')))
    return unpermute(array, heads) if heads else array

  @functools.cache
  def tokenizer(self):
    """The file's tokenizer; None where it has none. Raises UserError for a kind that is not known."""
    return gguf_tokenizer.build(self.path, self._metadata)


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
  """Rows [heads * h, ...] of neighbouring pairs as rows of halves: of a head of 8, 0 2 4 6 1 3 5 7."""
  rows, *rest = array.shape
  return array.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(array.shape)


def permute(array: np.ndarray, heads: int) -> np.ndarray:
  """The inverse of `unpermute`: of a head of 8, 0 4 1 5 2 6 3 7."""
  rows, *rest = array.shape
  return array.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(array.shape)
