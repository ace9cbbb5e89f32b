"""Reads tests/fixtures/*.npz (made by make_fixtures.py): transformers' tiny models as ours."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.models import layout, transformer

FIXTURES = pathlib.Path(__file__).parent / 'fixtures'
CLOSE = dict(rtol=0, atol=2e-5)  # logits are of order 1 to 10; 8e-6 was the largest difference seen

# What the name of an architecture means: settings that transformers' config does not spell out.
FAMILIES = {
    'llama': {}, 'mistral': {}, 'qwen2': {'bias': 'qkv'}, 'qwen3': {'qk_norm': 'head'},
    'olmo': {'norm': 'nonparametric_layernorm', 'norm_eps': 1e-5}, 'olmo2': {'qk_norm': 'full', 'scheme': 'res_norm'},
}


@functools.cache
def fixture(name):
  """(how to read it, {name: array})."""
  with np.load(FIXTURES / f'{name}.npz') as f:
    arrays = dict(f)
  return json.loads(str(arrays.pop('meta'))), arrays


def make_config(name, **changes):
  hf = fixture(name)[0]['config']
  same = {ours: hf[theirs] for ours, theirs in {
      'norm_eps': 'rms_norm_eps', 'head_dim': 'head_dim', 'clip_qkv': 'clip_qkv', 'sliding_window': 'sliding_window',
  }.items() if theirs in hf}
  return ModelConfig(**dict(
      vocab_size=hf['vocab_size'], d_model=hf['hidden_size'], d_ff=hf['intermediate_size'],
      num_layers=hf['num_hidden_layers'], num_heads=hf['num_attention_heads'], num_kv_heads=hf['num_key_value_heads'],
      rope_base=hf['rope_theta'], tie_embeddings=hf['tie_word_embeddings'], precision='float32')
      | same | FAMILIES[name.split('_')[0]] | changes)


def _attention(config, at, get):
  D, H, K, h = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
  heads = lambda w, n: w.reshape(n, h, D).transpose(2, 0, 1)
  found = {'q': heads(get(f'{at}.q_proj.weight'), H), 'k': heads(get(f'{at}.k_proj.weight'), K),
           'v': heads(get(f'{at}.v_proj.weight'), K), 'o': get(f'{at}.o_proj.weight').T.reshape(H, h, D)}
  if config.bias == 'qkv':
    found |= {f'{n}_bias': get(f'{at}.{n}_proj.bias') for n in 'qkv'}
  if config.qk_norm != 'none':
    found |= {f'{n}_norm': {'gain': get(f'{at}.{n}_norm.weight')} for n in 'qk'}
  return found


def _norms(config):
  """{our norm of a layer: transformers'}, of the norms that have parameters."""
  if config.norm == 'nonparametric_layernorm':
    return {}
  if config.scheme == 'res_norm':
    return {'attn_res_norm': 'post_attention_layernorm', 'mlp_res_norm': 'post_feedforward_layernorm'}
  return {'attn_in_norm': 'input_layernorm', 'mlp_in_norm': 'post_attention_layernorm'}


def tree(config, get):
  """Our parameters from `get(name)`, which returns a Hugging Face matrix [out, in], bias or gain."""
  gain = lambda name: {'gain': get(f'{name}.weight')}
  def layer(at):
    norms = {ours: gain(f'{at}.{theirs}') for ours, theirs in _norms(config).items()}
    mlp = {n: get(f'{at}.mlp.{n}_proj.weight').T for n in ('gate', 'up', 'down')}
    return {**norms, 'attn': _attention(config, f'{at}.self_attn', get), 'mlp': mlp}
  params = {
      'embed': {'table': get('model.embed_tokens.weight')},
      'layers': {str(l): layer(f'model.layers.{l - 1}') for l in config.layer_ids},
  }
  if config.norm == 'rmsnorm':
    params['final_norm'] = gain('model.norm')
  return params if config.tie_embeddings else params | {'head': {'table': get('lm_head.weight')}}


def read(name, config, kind='weight'):
  """Weights or gradients of a fixture as our tree, in the layout of the config's loop."""
  return layout.native(tree(config, lambda n: jnp.asarray(fixture(name)[1][f'{kind}/{n}'])), config)


def model(name, **changes):
  """(config, params, tokens, reference arrays)."""
  config = make_config(name, **changes)
  return config, read(name, config), fixture(name)[1]['tokens'], fixture(name)[1]


@functools.cache
def ours(name, loop, scheme=None):
  """(logits, states) of our model on the fixture's tokens."""
  config, params, tokens, _ = model(name, loop=loop, **({'scheme': scheme} if scheme else {}))
  @jax.jit
  def both(params):
    logits, out = transformer.apply(config, params, {'tokens': tokens}, ['embed', 'layers/*/out'])
    return logits, jnp.stack([out['embed'], *(out[f'layers/{l}/out'] for l in config.layer_ids)])
  return both(params)
