"""What a model_type of Hugging Face means in our settings: config.json -> ModelConfig, and back.

Defaults of missing fields are those of the architecture, as transformers has them.
"""

import dataclasses
from collections.abc import Callable, Mapping

from lns_jax.config import ROPES, ModelConfig, RopeScaling
from lns_jax.errors import UserError, nearest
from lns_jax.interop import config_json, names
from lns_jax.interop.fields import MOST_LAYERS, Fields, is_number

Settings = dict  # of ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
  """One model_type.

  Attributes:
    ours: fields -> settings of ModelConfig.
    rows: how tensors are called.
    prefixes: what the names may begin with instead of the first of these.
    extras: parts of names of tensors that stand for nothing.
    unused: parts of names of weights that no part of a model of ours stands for; a warning names them.
    aliases: (part of a name, what others have there), such as names of older files.
    tied: the head's tensor, which may be there where the head is the embedding.
    theirs: settings -> the fields of config.json.
    architecture: the class that config.json names.
  """

  ours: Callable[[Fields], Settings]
  rows: list[names.Entry]
  prefixes: tuple[str, ...] = ('model.', '')
  extras: tuple[str, ...] = ('rotary_emb.inv_freq',)
  unused: tuple[str, ...] = ()
  aliases: tuple[tuple[str, str], ...] = ()
  tied: str = 'lm_head.weight'
  theirs: Callable[[ModelConfig], dict] | None = None
  architecture: str = ''


def _bias(f: Fields, *, of_mlp: bool = False) -> str:
  """model.bias by the field attention_bias, and, where the class has it, mlp_bias."""
  attention, mlp = f.flag('attention_bias', False), of_mlp and f.flag('mlp_bias', False)
  return 'all' if attention and mlp else 'attn' if attention else 'mlp' if mlp else 'none'


def _scaling(f: Fields, max_positions: int) -> tuple[float, RopeScaling]:
  """(base, scaling) from rope_theta and rope_scaling, or from rope_parameters, which newer files have instead."""
  base = f.number('rope_theta', 10000.0, float)
  name = 'rope_parameters' if f.take('rope_parameters') else 'rope_scaling'
  values = f.group(name)
  part = f.number('partial_rotary_factor', 1.0, float)
  if values.pop('partial_rotary_factor', None) not in (None, 1) or part != 1:
    raise f.refused(name, 'every number of a head must be turned, a partial_rotary_factor of 1')
  given = values.pop('rope_theta', None)
  base = given or base
  if not is_number(base) or base <= 0:
    raise f.refused(name if given else 'rope_theta', 'rope_theta must be a number above 0')
  base = float(base)
  kind = values.pop('rope_type', None) or values.get('type', 'default')
  values.pop('type', None)
  if kind == 'default':
    return base, RopeScaling()
  if kind == 'mrope' or kind not in ROPES:
    raise f.refused(name, f'the kinds of scaling are default, {", ".join(ROPES[1:])}')
  given = {n: v for n, v in values.items() if v is not None}
  original = f.take('original_max_position_embeddings') or given.pop('original_max_position_embeddings', None)
  original = max_positions if kind == 'dynamic' or not original else original
  for n, v in {**given, 'original_max_position_embeddings': original}.items():
    numbers = v if isinstance(v, list) and n.endswith('_factor') else [v]
    if n != 'truncate' and not all(map(is_number, numbers)):
      raise f.refused(name, f'its field {n!r} must be a number, and is {v!r}')
  if kind in ('yarn', 'longrope') and 'factor' not in given:
    given['factor'] = max_positions / original
  known = {n.name for n in dataclasses.fields(RopeScaling)}
  unknown = sorted(given.keys() - known)
  if unknown:
    raise f.refused(name, f'its field {unknown[0]!r} is not known{nearest(unknown[0], known)}')
  given = {n: tuple(map(float, v)) if isinstance(v, list) else v if n == 'truncate' else float(v)
           for n, v in given.items()}
  return base, RopeScaling(**given, kind=kind, original_length=int(original))


def _windows(f: Fields, size: int, first: int, layers: int) -> Settings:
  """A window of `size` keys in the layers from position `first` on, unless layer_types says in which."""
  types = f.listed('layer_types') or ['sliding_attention' if i >= first else 'full_attention' for i in range(layers)]
  if len(types) != layers or any(t not in ('sliding_attention', 'full_attention') for t in types):
    raise f.refused('layer_types', f'it names sliding_attention or full_attention for each of {layers} layers')
  with_window = tuple(i + 1 for i, kind in enumerate(types) if kind == 'sliding_attention')
  if not size or not with_window:
    return {}
  return {'sliding_window': size, 'window_layers': () if len(with_window) == layers else with_window}


def decoder(f: Fields, kv_heads: int | None = None, eps: float = 1e-6) -> Settings:
  """What the Llama-like families have in common."""
  f.only('hidden_act', ('silu', 'swish'), 'silu')
  heads, d_model = f.size('num_attention_heads'), f.size('hidden_size')
  max_positions = f.size('max_position_embeddings', 2048)
  base, scaling = _scaling(f, max_positions)
  return {
      'vocab_size': f.size('vocab_size'), 'd_model': d_model, 'd_ff': f.size('intermediate_size'),
      'num_layers': f.size('num_hidden_layers', most=MOST_LAYERS), 'num_heads': heads,
      'num_kv_heads': f.size('num_key_value_heads', kv_heads or heads),
      'head_dim': f.size('head_dim', d_model // heads), 'max_positions': max_positions,
      'norm_eps': f.number('rms_norm_eps', eps, float), 'rope_base': base, 'rope_scaling': scaling,
      'tie_embeddings': f.flag('tie_word_embeddings', False)}


def _llama(f: Fields) -> Settings:
  return decoder(f) | {'bias': _bias(f, of_mlp=True)}


def _mistral(f: Fields) -> Settings:
  window = 0 if f.given('sliding_window', 4096) is None else f.number('sliding_window', 4096)
  found = decoder(f, kv_heads=8)
  return found | _windows(f, window, 0, found['num_layers'])


def qwen_windows(f: Fields, layers: int, first: int = 28) -> Settings:
  """Two gates: use_sliding_window switches all windows, max_window_layers counts the lower layers without one.

  first: the class's max_window_layers.
  """
  size, first = f.number('sliding_window', 4096), f.number('max_window_layers', first)
  return _windows(f, size if f.flag('use_sliding_window', False) else 0, first, layers)


def _qwen2(f: Fields) -> Settings:
  found = decoder(f, kv_heads=32)
  f.only('attention_bias', (True,), True)  # it has no such field and always has the biases
  return found | qwen_windows(f, found['num_layers']) | {'bias': 'qkv'}


def _qwen3(f: Fields) -> Settings:
  found = decoder(f, kv_heads=32) | {'head_dim': f.size('head_dim', 128), 'qk_norm': 'head'}
  return found | qwen_windows(f, found['num_layers']) | {'bias': _bias(f)}


def _olmo(f: Fields) -> Settings:
  return decoder(f) | {'norm': 'nonparametric_layernorm', 'norm_eps': 1e-5, 'bias': _bias(f),
                       'clip_qkv': f.number('clip_qkv', 0.0, float)}


def _olmo2(f: Fields) -> Settings:
  return decoder(f, eps=1e-5) | {'qk_norm': 'full', 'scheme': 'res_norm', 'bias': _bias(f)}


_GELUS = {'gelu': 'gelu', 'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh'}


def _gpt2(f: Fields) -> Settings:
  f.only('scale_attn_weights', (True,), True)
  f.only('scale_attn_by_inverse_layer_idx', (False,), False)
  f.only('add_cross_attention', (False,), False)
  d_model = f.size('n_embd', 768)
  return {
      'vocab_size': f.size('vocab_size', 50257), 'd_model': d_model, 'd_ff': f.size('n_inner', 4 * d_model),
      'num_layers': f.size('n_layer', 12, most=MOST_LAYERS), 'num_heads': f.size('n_head', 12), 'norm': 'layernorm',
      'norm_eps': f.number('layer_norm_epsilon', 1e-5, float), 'positions': 'learned',
      'max_positions': f.size('n_positions', 1024), 'bias': 'all',
      'mlp': _GELUS[f.only('activation_function', _GELUS, 'gelu_new')],
      'tie_embeddings': f.flag('tie_word_embeddings', True)}


def _vit(f: Fields) -> Settings:
  f.only('hidden_act', ('gelu',), 'gelu')
  f.only('qkv_bias', (True,), True)
  for name in ('encoder_stride', 'pooler_act', 'pooler_output_size'):  # of heads that a classifier does not have
    f.take(name)
  labels = f.group('id2label')
  return {
      'family': 'vit', 'causal': False, 'image_size': f.size('image_size', 224),
      'patch_size': f.size('patch_size', 16), 'channels': f.size('num_channels', 3),
      'num_classes': len(labels) or f.size('num_labels', 2),
      'd_model': f.size('hidden_size', 768), 'd_ff': f.size('intermediate_size', 3072),
      'num_layers': f.size('num_hidden_layers', 12, most=MOST_LAYERS), 'num_heads': f.size('num_attention_heads', 12),
      'norm': 'layernorm', 'norm_eps': f.number('layer_norm_eps', 1e-12, float), 'mlp': 'gelu', 'bias': 'all'}


_BERT_HEADS = {name: head for head, name in config_json.BERT.items()} | {'BertForPreTraining': 'mlm'}
_BERT_POOLER = ('pooler_fc_size', 'pooler_num_attention_heads', 'pooler_num_fc_layers', 'pooler_size_per_head',
                'pooler_type')  # of a layer that we do not read


def _bert(f: Fields) -> Settings:
  f.only('hidden_act', ('gelu',), 'gelu')
  f.only('position_embedding_type', ('absolute',), 'absolute')
  f.only('directionality', ('bidi',), 'bidi')
  f.only('is_decoder', (False,), False)
  f.only('add_cross_attention', (False,), False)
  for name in _BERT_POOLER:
    f.take(name)
  kind = f.take('architectures', ['BertModel'])
  if not isinstance(kind, list) or len(kind) != 1 or kind[0] not in tuple(_BERT_HEADS):
    raise f.refused('architectures', f'understood is one of {", ".join(_BERT_HEADS)}')
  head, tied = _BERT_HEADS[kind[0]], f.flag('tie_word_embeddings', True)
  return {
      'family': 'encoder', 'causal': False, 'scheme': 'post', 'vocab_size': f.size('vocab_size', 30522),
      'max_positions': f.size('max_position_embeddings', 512), 'type_vocab_size': f.size('type_vocab_size', 2),
      'd_model': f.size('hidden_size', 768), 'd_ff': f.size('intermediate_size', 3072),
      'num_layers': f.size('num_hidden_layers', 12, most=MOST_LAYERS), 'num_heads': f.size('num_attention_heads', 12),
      'norm': 'layernorm', 'norm_eps': f.number('layer_norm_eps', 1e-12, float), 'mlp': 'gelu', 'bias': 'all',
      'head': head, 'tie_embeddings': tied and head == 'mlm'}


FAMILIES = {
    'llama': Family(_llama, names.LLAMA, theirs=config_json.llama, architecture='LlamaForCausalLM'),
    'mistral': Family(_mistral, names.LLAMA, theirs=config_json.mistral, architecture='MistralForCausalLM'),
    'qwen2': Family(_qwen2, names.LLAMA, theirs=config_json.qwen2, architecture='Qwen2ForCausalLM'),
    'qwen3': Family(_qwen3, names.LLAMA, theirs=config_json.qwen3, architecture='Qwen3ForCausalLM'),
    'olmo': Family(_olmo, names.LLAMA, theirs=config_json.olmo, architecture='OlmoForCausalLM'),
    'olmo2': Family(_olmo2, names.LLAMA, theirs=config_json.olmo2, architecture='Olmo2ForCausalLM'),
    'gpt2': Family(_gpt2, names.GPT2, ('transformer.', ''), ('attn.bias', 'attn.masked_bias'),
                   theirs=config_json.gpt2, architecture='GPT2LMHeadModel'),
    'vit': Family(_vit, names.VIT, ('vit.', ''), ('pooler.dense',), theirs=config_json.vit,
                  architecture='ViTForImageClassification'),
    'bert': Family(
        _bert, names.BERT, ('bert.', ''), ('embeddings.position_ids',), ('pooler.dense', 'cls.seq_relationship'),
        (('LayerNorm.weight', 'LayerNorm.gamma'), ('LayerNorm.bias', 'LayerNorm.beta'),
         ('cls.predictions.bias', 'cls.predictions.decoder.bias')), 'cls.predictions.decoder.weight',
        theirs=config_json.bert),
}


VL = 'qwen2_5_vl'


def refuse_quantised(config: dict, where):
  """Raises UserError for packed weights of Hugging Face's own kinds."""
  if config.get('quantization_config'):
    raise UserError(f'{where}: quantization_config is not supported; give the folder with the weights as they were '
                    'before, or a .gguf file.')


def of(config: dict, where, known: Mapping[str, Family] = FAMILIES) -> tuple[Family, Settings]:
  """The family and the settings that a config.json stands for.

  Raises UserError for an unknown model_type, and for a field that is missing, not understood or not known.
  """
  kind = config.get('model_type')
  if kind == VL and VL not in known:
    raise UserError(f'{where}: model_type = {kind!r} has two towers; lns_jax.interop.vl.load opens it, and '
                    'experiments/vl_layers.py measures it.')
  if kind not in tuple(known):  # of what JSON can hold, not all can be looked up
    raise UserError(f'{where}: model_type = {kind!r} is not known; known are {", ".join(known)}.')
  refuse_quantised(config, where)
  family, fields = known[kind], Fields(config, where)
  settings = family.ours(fields)
  fields.finish()
  return family, settings
