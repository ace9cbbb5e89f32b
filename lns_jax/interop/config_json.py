"""The fields of config.json that say what a model of ours computes: the way back from `families`.

Each function writes what its class can say, or raises UserError where it takes no such model. Whether that is the
model, `export` finds out by reading it again.
"""

import dataclasses

from lns_jax.config import BIASES, ModelConfig
from lns_jax.errors import UserError


def llama(c: ModelConfig) -> dict:
  if c.d_model % c.num_heads:  # with head_dim in config.json, too
    raise UserError(f'model.d_model = {c.d_model} is no multiple of model.num_heads = {c.num_heads}, which stock Llama '
                    'asks for; mistral does not.')
  return _decoder(c) | {'attention_bias': 'o' in BIASES[c.bias], 'mlp_bias': 'down' in BIASES[c.bias]}


def mistral(c: ModelConfig) -> dict:
  return _decoder(c) | {'sliding_window': c.sliding_window or None}


def qwen2(c: ModelConfig) -> dict:
  return _decoder(c) | _windows(c)


def qwen3(c: ModelConfig) -> dict:
  return qwen2(c) | {'attention_bias': 'o' in BIASES[c.bias]}


def olmo(c: ModelConfig) -> dict:
  found = _decoder(c) | {'attention_bias': 'o' in BIASES[c.bias], 'clip_qkv': c.clip_qkv or None}
  return {name: value for name, value in found.items() if name not in ('rms_norm_eps', 'head_dim')}


def olmo2(c: ModelConfig) -> dict:
  found = _decoder(c) | {'attention_bias': 'o' in BIASES[c.bias]}
  return {name: value for name, value in found.items() if name != 'head_dim'}


def gpt2(c: ModelConfig) -> dict:
  return {
      'vocab_size': c.vocab_size, 'n_embd': c.d_model, 'n_inner': c.d_ff, 'n_layer': c.num_layers,
      'n_head': c.num_heads, 'n_positions': c.max_positions, 'layer_norm_epsilon': c.norm_eps,
      'activation_function': 'gelu' if c.mlp == 'gelu' else 'gelu_new', 'tie_word_embeddings': c.tie_embeddings,
      'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0}


def vit(c: ModelConfig) -> dict:
  return {
      'image_size': c.image_size, 'patch_size': c.patch_size, 'num_channels': c.channels, 'hidden_size': c.d_model,
      'intermediate_size': c.d_ff, 'num_hidden_layers': c.num_layers, 'num_attention_heads': c.num_heads,
      'layer_norm_eps': c.norm_eps, 'hidden_act': 'gelu', 'qkv_bias': True, 'hidden_dropout_prob': 0.0,
      'attention_probs_dropout_prob': 0.0, 'id2label': {str(i): str(i) for i in range(c.num_classes)},
      'label2id': {str(i): i for i in range(c.num_classes)}}


BERT = {'none': 'BertModel', 'mlm': 'BertForMaskedLM', 'squad': 'BertForQuestionAnswering'}  # classes by model.head
BERT_AUTO = {'none': 'AutoModel', 'mlm': 'AutoModelForMaskedLM', 'squad': 'AutoModelForQuestionAnswering'}


def bert(c: ModelConfig) -> dict:
  return {
      'architectures': [BERT[c.head]], 'vocab_size': c.vocab_size, 'max_position_embeddings': c.max_positions,
      'type_vocab_size': c.type_vocab_size, 'hidden_size': c.d_model, 'intermediate_size': c.d_ff,
      'num_hidden_layers': c.num_layers, 'num_attention_heads': c.num_heads, 'layer_norm_eps': c.norm_eps,
      'hidden_act': 'gelu', 'position_embedding_type': 'absolute', 'hidden_dropout_prob': 0.0,
      'attention_probs_dropout_prob': 0.0, 'tie_word_embeddings': c.tie_embeddings or c.head != 'mlm'}


def _decoder(c: ModelConfig) -> dict:
  """What the Llama-like classes have in common."""
  return {
      'vocab_size': c.vocab_size, 'hidden_size': c.d_model, 'intermediate_size': c.d_ff,
      'num_hidden_layers': c.num_layers, 'num_attention_heads': c.num_heads, 'num_key_value_heads': c.num_kv_heads,
      'head_dim': c.head_dim, 'hidden_act': 'silu', 'max_position_embeddings': c.max_positions,
      'rms_norm_eps': c.norm_eps, 'rope_theta': c.rope_base, 'rope_scaling': _scaling(c),
      'tie_word_embeddings': c.tie_embeddings, 'attention_dropout': 0.0}


def _scaling(c: ModelConfig) -> dict | None:
  """rope_scaling: what is not as by default."""
  s = c.rope_scaling
  if s.kind == 'none':
    return None
  own = {f.name: getattr(s, f.name) for f in dataclasses.fields(s) if f.name not in ('kind', 'original_length')}
  own = {name: list(v) if isinstance(v, tuple) else v for name, v in own.items()
         if v != type(s).__dataclass_fields__[name].default or _asked(s.kind, name)}
  original = {'original_max_position_embeddings': s.original_length} if s.kind not in ('linear', 'dynamic') else {}
  return {'rope_type': s.kind, **own, **original}


def _asked(kind: str, name: str) -> bool:
  """Whether transformers asks for the field whatever its value is."""
  return name == 'factor' or kind == 'llama3' and name.endswith('freq_factor')


def _windows(c: ModelConfig) -> dict:
  """Qwen's windows: both gates open, and the layers by name."""
  if not c.sliding_window:
    return {'use_sliding_window': False, 'sliding_window': None, 'layer_types': ['full_attention'] * c.num_layers}
  kinds = ['sliding_attention' if c.window(l) else 'full_attention' for l in c.layer_ids]
  return {'use_sliding_window': True, 'sliding_window': c.sliding_window, 'max_window_layers': 0, 'layer_types': kinds}
