"""Shipped configs: they load, they are the paper's, and they say so."""

import dataclasses
import math

import jax
import pytest

from lns_jax import advice, presets
from lns_jax.errors import UserError
from lns_jax.models import layout, transformer

# name: (parameters in millions (paper.md 3.1), peak rate, steps, warm-up)
PAPER = {
    '9m': (9.0, None, None, None), '20m': (19.5, None, None, None), '35m': (35.2, None, None, None),
    '60m': (58.1, None, None, None), '71m': (70.6, None, None, None),
    '130m': (134.1, 1e-3, 20_000, 2_000), '250m': (247.4, 1e-3, 40_000, 4_000), '350m': (368.0, 1e-3, 60_000, 6_000),
    '1b': (1339.1, 5e-4, 100_000, 1_000), '3b': (2685.8, None, None, None), '7b': (6738.4, None, None, None)}


@pytest.mark.parametrize('name', presets.config_names())
def test_every_config_loads_and_names_its_command(name):
  command = 'vision.py' if presets.load_config(name).model.family == 'vit' else 'pretrain.py'
  assert f'experiments/{command} --config={name}' in presets.config_names()[name].read_text().split('"""')[1]


@pytest.mark.parametrize('size', PAPER)
def test_paper_presets_are_the_papers(size):
  config = presets.load_config(f'llama_{size}')
  shapes = jax.eval_shape(lambda: transformer.init(config.model, jax.random.key(0)))
  millions, rate, steps, warmup = PAPER[size]
  assert round(sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) / 1e6, 1) == millions
  m, o, t = config.model, config.optimizer, config.train
  assert (m.vocab_size, m.norm_eps, m.init, m.tie_embeddings) == (32000, 1e-6, 'paper', False)
  assert (o.name, o.b1, o.b2, o.eps, o.weight_decay, o.clip_norm) == ('adam', 0.9, 0.999, 1e-8, 0, 0)
  assert (t.batch_size, t.seed, config.data.seq_len, config.data.seed) == (512, 1, 256, 32)
  assert (config.data.packing, config.eval.max_tokens) == ('paper', 10_000_000)
  if rate:
    assert (o.lr, t.steps, o.warmup_steps) == (rate, steps, warmup)


def swiglu(D, F):
  return 3 * D * F


# name: (parameters, as published but for OLMo 1's small ones, whose counts nobody states; the same by hand: tables;
# layers with q and o, k and v, MLP, norms; final norm)
ARCHITECTURES = {
    'olmo_60m': (85_065_728, 2 * 50304 * 512 + 8 * (4 * 512**2 + swiglu(512, 2048))),
    'olmo_150m': (190_513_152, 2 * 50304 * 768 + 12 * (4 * 768**2 + swiglu(768, 3072))),
    'olmo_300m': (371_458_048, 2 * 50304 * 1024 + 16 * (4 * 1024**2 + swiglu(1024, 4096))),
    'olmo_1b': (1_176_764_416, 50304 * 2048 + 16 * (4 * 2048**2 + swiglu(2048, 8192))),
    'olmo_7b': (6_888_095_744, 2 * 50304 * 4096 + 32 * (4 * 4096**2 + swiglu(4096, 11008))),
    # four norms of D a layer: two on branches, of all queries, of all keys
    'olmo2_1b': (1_484_916_736, 2 * 100352 * 2048 + 16 * (4 * 2048**2 + swiglu(2048, 8192) + 4 * 2048) + 2048),
    # q and k of 14 and v of 2 heads of 64 with biases
    'qwen2_5_0_5b': (494_032_768, 151936 * 896 + 24 * (
        2 * 896**2 + 2 * 896 * 128 + 896 + 2 * 128 + swiglu(896, 4864) + 2 * 896) + 896),
    'qwen3_0_6b': (596_049_920, 151936 * 1024 + 28 * (
        2 * 1024 * 2048 + 2 * 1024 * 1024 + 2 * 128 + swiglu(1024, 3072) + 2 * 1024) + 1024),
    'mistral_7b': (7_241_732_096, 2 * 32000 * 4096 + 32 * (
        2 * 4096**2 + 2 * 4096 * 1024 + swiglu(4096, 14336) + 2 * 4096) + 4096),
}


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_parameters_of_the_architectures(name):
  config = presets.load_config(name)
  shapes = jax.eval_shape(lambda: transformer.init(config.model, jax.random.key(0)))
  count, by_hand = ARCHITECTURES[name]
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == count == by_hand
  assert config.train.batch_size * config.data.seq_len == 2**19
  assert not advice.warnings(config)


def test_qwen2_5_has_the_tensors_of_its_checkpoint():
  # known fault I3: 290 keys
  model = presets.load_config('qwen2_5_0_5b').model
  shapes = jax.eval_shape(lambda: layout.unstack(transformer.init(model, jax.random.key(0))))
  assert len(jax.tree.leaves(shapes)) == 290


def vit_by_hand(D, L, pixels, tokens, classes, layerscale):
  # four projections, two of 4 D, all with biases; two norms of gain and bias; LayerScale on both branches
  layer = 4 * (D**2 + D) + 8 * D**2 + 5 * D + 4 * D + 2 * D * layerscale
  return pixels * D + D + D + tokens * D + L * layer + 2 * D + classes * D + classes


@pytest.mark.parametrize('name, published, by_hand', [
    ('vit_s16', 22_050_664, vit_by_hand(384, 12, 16 * 16 * 3, 1 + 14 * 14, 1000, False)),
    ('vit_s16_36x1', 64_665_448, vit_by_hand(384, 36, 768, 197, 1000, True)),
    ('vit_s16_36x1:noscale', 64_637_800, vit_by_hand(384, 36, 768, 197, 1000, False)),
    ('vit_tiny', 305_034, vit_by_hand(64, 6, 4 * 4, 1 + 7 * 7, 10, False)),
    ('vit_tiny:digits', 302_154, vit_by_hand(64, 6, 2 * 2, 1 + 4 * 4, 10, False)),
])
def test_parameters_of_the_vision_transformers(name, published, by_hand):
  model = presets.load_config(name).model
  shapes = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == published == by_hand
  assert (model.norm, model.norm_eps, model.bias, model.mlp, model.pooling) == ('layernorm', 1e-6, 'all', 'gelu', 'cls')


def test_the_deep_vision_transformer_has_timms_layerscale_or_none():
  scaled, plain = (presets.load_config(n).model for n in ('vit_s16_36x1', 'vit_s16_36x1:noscale'))
  assert (scaled.scheme, scaled.layerscale_init, plain.scheme) == ('layerscale', 1e-5, 'pre')
  shapes = lambda m: jax.eval_shape(lambda: transformer.init(m, jax.random.key(0)))['layers']['36']
  assert shapes(scaled)['attn_b'].shape == shapes(scaled)['mlp_b'].shape == (384,)
  with pytest.raises(UserError, match="'noscal'.*noscale"):
    presets.load_config('vit_s16_36x1:noscal')


@pytest.mark.parametrize('scheme', ['pre', 'lns', 'branch_lns'])
def test_rows_of_table_5_have_the_same_parameters(scheme):
  model = dataclasses.replace(presets.load_config('vit_s16').model, scheme=scheme)
  shapes = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == 22_050_664


# paper.md 3.3: (rate, schedule, warm-up, positions in a row, init)
OLMO = {'60m': (6e-4, 'cosine', 5000, 4096, 'truncated'), '150m': (6e-4, 'cosine', 5000, 4096, 'truncated'),
        '300m': (6e-4, 'cosine', 5000, 4096, 'truncated'), '1b': (4e-4, 'cosine', 2000, 2048, 'mitchell'),
        '7b': (3e-4, 'linear', 5000, 2048, 'mitchell')}


@pytest.mark.parametrize('size', OLMO)
def test_olmo_presets_are_olmos_with_20b_tokens(size):
  config = presets.load_config(f'olmo_{size}')
  m, o = config.model, config.optimizer
  assert (o.lr, o.schedule, o.warmup_steps, config.data.seq_len, m.init) == OLMO[size]
  assert config.train.steps == 38_147 == round(20e9 / 2**19)
  assert (o.name, o.b1, o.b2, o.weight_decay, o.clip_norm, o.final_lr_ratio) == ('adamw', 0.9, 0.95, 0.1, 1.0, 0.1)
  assert o.decay == ('matrices' if size in ('1b', '7b') else 'all')
  assert (m.norm, m.norm_eps, m.tie_embeddings, m.rope_base) == ('nonparametric_layernorm', 1e-5, size == '1b', 1e4)


@pytest.mark.parametrize('name, changes, words', [
    ('olmo_60m', {}, None), ('olmo_1b', {'init': 'normal'}, None), ('qwen2_5_0_5b', {}, None), ('mistral_7b', {}, None),
    ('olmo_1b', {}, 'mitchell'), ('olmo_7b', {}, 'mitchell'), ('qwen3_0_6b', {}, 'qk_norm')])
def test_what_fights_lns_in_a_preset_is_one_line(name, changes, words):
  config = presets.load_config(name)
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, scheme='lns', **changes))
  found = advice.warnings(config)
  assert not found if words is None else len(found) == 1 and words in found[0]


def test_an_argument_goes_to_the_config():
  assert presets.load_config('quickstart:tiny').train.steps < presets.load_config('quickstart').train.steps
