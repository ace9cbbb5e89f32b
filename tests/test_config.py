"""Settings: nothing impossible or unknown gets through, and every refusal names the nearest right thing."""

import dataclasses
import math

import pytest

from lns_jax import advice
from lns_jax import config as c
from lns_jax.errors import UserError
from lns_jax.layers import schemes


def build(**groups):
  return c.from_dict(c.RunConfig, groups)


def test_defaults_survive_the_round_trip():
  assert c.from_dict(c.RunConfig, c.to_dict(c.RunConfig())) == c.RunConfig()
  assert c.from_dict(c.RunConfig, c.defaults() | {'train': {**c.defaults()['train'], 'steps': 1000}}) == c.RunConfig()


VIT = {'family': 'vit', 'causal': False}
ENCODER = {'family': 'encoder', 'causal': False, 'max_positions': 24}


@pytest.mark.parametrize('values, words', [
    ({'model': {'schme': 'pre'}}, ['model.schme', "'scheme'"]),
    ({'optimiser': {}}, ['optimiser', "'optimizer'"]),
    ({'optimizer': {'wdd': 1.0}}, ['optimizer.wdd', 'Known']),
    ({'model': 'pre'}, ['model', 'group']),
    ({'model': {'scheme': 'lnss'}}, ["'lnss'", "'lns'", 'deepnorm']),
    ({'model': {'scheme': ''}}, ["''", 'Known', 'lns', 'pre']),
    ({'optimizer': {'lr': math.nan}}, ['optimizer.lr', 'finite', 'nan']),
    ({'optimizer': {'lr': math.inf}}, ['optimizer.lr', 'finite']),
    ({'optimizer': {'lr': -1e-3}}, ['optimizer.lr', 'above 0']),
    ({'optimizer': {'lr': 'fast'}}, ['optimizer.lr', 'float']),
    ({'optimizer': {'b1': 1.0}}, ['optimizer.b1', 'below 1']),
    ({'model': {'num_layers': 2.5}}, ['model.num_layers', 'int']),
    ({'model': {'num_layers': True}}, ['model.num_layers', 'int']),
    ({'model': {'num_layers': 0}}, ['model.num_layers', 'at least 1']),
    ({'model': {'num_heads': 7}}, ['num_heads', '7', '768', '6 or 8 heads']),
    ({'model': {'num_kv_heads': 5}}, ['num_kv_heads', '5', '12']),
    ({'model': {'head_dim': 7}}, ['head_dim', 'even']),
    ({'model': {'mlp': 'relu'}}, ['model.mlp', "'relu'", 'swiglu', 'gelu']),
    ({'model': {'bias': 'qk'}}, ['model.bias', "'qk'", 'none', 'qkv', 'all']),
    ({'model': {'qk_norm': 'heads'}}, ['model.qk_norm', "'heads'", "'head'", 'full']),
    ({'model': {'clip_qkv': -1.0}}, ['model.clip_qkv', 'at least 0']),
    ({'model': {'causal': False}}, ['model.causal = False', 'the token that it is to predict']),
    ({'model': {'scheme': 'group_ln', 'norm': 'layernorm', 'd_model': 8, 'num_heads': 2, 'norm_groups': 8}},
     ['norm_groups = 8', 'leaves 0']),
    ({'model': {'sliding_window': 4, 'causal': False}}, ['sliding_window = 4', 'causal = True', 'only 0']),
    ({'model': {'family': 'bert'}}, ['model.family', "'bert'", 'decoder', 'vit']),
    ({'model': {'family': 'vit'}}, ['model.family = vit', 'model.causal', 'only False']),
    ({'model': {'family': 'encoder'}}, ['model.family = encoder', 'whole text', 'model.causal', 'only False']),
    ({'model': ENCODER | {'max_positions': 0}}, ['model.max_positions', 'above 0']),
    ({'model': ENCODER | {'head': 'squad', 'tie_embeddings': True}}, ['model.tie_embeddings', 'model.head = mlm']),
    ({'model': ENCODER | {'rope_base': 5e5}}, ['model.rope_base', 'model.family = decoder', 'type_vocab_size, head']),
    ({'model': {'type_vocab_size': 3}}, ['model.type_vocab_size = 3', 'model.family = encoder']),
    ({'model': {'family': 'tower'}}, ['model.family = tower', 'model.causal', 'only False']),
    ({'model': {'family': 'tower', 'causal': False}}, ['model.family = tower', 'decoder or vit']),
    ({'model': {'window_size': 112}}, ['model.window_size = 112', 'tower']),
    ({'model': {'family': 'tower', 'causal': False, 'window_size': 28}}, ['model.window_size = 28', '32']),
    ({'model': {'family': 'tower', 'causal': False, 'window_size': 64, 'window_layers': [13]}},
     ['model.window_layers', '13', '1 to 12']),
    ({'model': {'family': 'tower', 'causal': False, 'window_layers': [1]}}, ['(1,)', 'model.window_size']),
    ({'model': {'family': 'tower', 'causal': False, 'head_dim': 6}}, ['model.head_dim = 6', 'multiple of 4']),
    ({'model': {'rope_sections': [16, 24, 24]}}, ['(16, 24, 24)', '32']),
    *(({'model': VIT | {name: value}}, [f'model.{name} = {value}', 'image_size, patch_size, channels', 'pooling'])
      for name, value in (('tie_embeddings', True), ('sliding_window', 4), ('rope_base', 5e5), ('vocab_size', 100))),
    ({'model': VIT, 'data': {'packing': 'paper'}}, ["data.packing = 'paper'", 'model.family = vit']),
    ({'model': VIT, 'data': {'seq_len': 128}}, ['data.seq_len = 128', 'model.family = vit']),
    ({'model': VIT, 'train': {'tokens': '1M'}}, ['train.tokens', 'model.family = vit']),
    ({'model': {'patch_size': 8}}, ['model.patch_size = 8', 'model.family = decoder', 'vocab_size, sliding_window']),
    ({'model': {'pooling': 'mean'}}, ["model.pooling = 'mean'", 'model.family = decoder']),
    ({'model': VIT | {'pooling': 'max'}}, ['model.pooling', "'max'", 'cls', 'mean']),
    ({'model': VIT | {'patch_size': 15}}, ['patch_size = 15', 'image_size = 224', '14 or 16 would']),
    ({'model': {'mix_fraction': 1.5}}, ['mix_fraction', 'at most 1']),
    ({'model': {'mix_fraction': -0.1}}, ['mix_fraction', 'at least 0']),
    ({'model': {'mix_count': 13}}, ['mix_count = 13', '12 layers']),
    ({'model': {'scheme': 'group_ln', 'norm_groups': 7}}, ['norm_groups = 7', '768']),
    ({'model': {'scheme': 'group_ln', 'norm': 'dyt'}}, ['group_ln', 'dyt', 'allowed are rmsnorm, layernorm']),
    ({'model': {'scheme': 'lns_init', 'norm': 'nonparametric_layernorm'}},
     ['lns_init', 'no gain', 'allowed are rmsnorm, layernorm, dyt']),
    ({'model': {'norm': 'batchnorm'}}, ["'batchnorm'", 'rmsnorm', 'dyt']),
    ({'model': {'init': 'kaiming'}}, ["'kaiming'", 'paper', 'mitchell', 'deepnorm']),
    ({'model': {'prores_steps': 0}}, ['prores_steps', 'at least 1']),
    ({'model': {'completep_alpha': 2}}, ['completep_alpha', 'at most 1']),
    ({'model': {'scheme': 'completep', 'base_width': 96, 'init': 'mitchell'}},
     ['completep', 'mitchell', 'allowed', 'scaled']),
    ({'optimizer': {'alpha_clip': 'apart'}}, ['alpha_clip = apart', 'alpha_clip_norm or optimizer.clip_norm']),
    ({'optimizer': {'alpha_clip_norm': 0.1}}, ['alpha_clip_norm = 0.1', 'apart']),
    ({'optimizer': {'alpha_clip': 'off'}}, ['alpha_clip', 'joint', 'apart', 'none']),
    ({'model': {'layer_ids': [1, 2]}}, ['layer_ids', '2', '12']),
    ({'model': {'num_layers': 2, 'layer_ids': [3, 2]}}, ['layer_ids', 'rise']),
    ({'model': {'num_layers': 2, 'layer_ids': [2, 9], 'depth': 8}}, ['layer_ids', 'depth = 8']),
    ({'train': {'steps': 10}, 'optimizer': {'warmup_steps': 11}}, ['warmup_steps = 11', '10 steps']),
    ({'train': {'steps': 10, 'tokens': '1M'}}, ['exactly one', 'train.steps', 'train.tokens']),
    ({'train': {}}, ['exactly one']),
    ({'train': {'tokens': 'many'}}, ["'many'", '100M']),
    ({'train': {'steps': 1, 'batch_size': 12, 'accumulation': 5}}, ['12', '5', '10 or 15']),
    ({'optimizer': {'weight_decay': 0.1}}, ['weight_decay', 'adamw']),
])
def test_refuses(values, words):
  with pytest.raises(UserError) as refusal:
    build(**{'train': {'steps': 10}, **values})
  for word in words:
    assert word in str(refusal.value)


@pytest.mark.parametrize('name', ['LNS', 'lns', 'Lns'])
def test_scheme_names_have_no_case(name):
  assert c.ModelConfig(scheme=name).scheme == 'lns'


def test_an_integer_is_a_float_and_a_list_is_a_tuple():
  assert isinstance(c.OptimizerConfig(lr=1).lr, float)
  assert c.ModelConfig(num_layers=2, layer_ids=[4, 7]).layer_ids == (4, 7)


def test_derived_settings():
  m = c.ModelConfig(num_layers=3)
  assert (m.layer_ids, m.depth, m.head_dim, m.num_kv_heads) == ((1, 2, 3), 3, 64, 12)
  assert c.ModelConfig(num_layers=2, layer_ids=(1, 3)).depth == 3
  assert c.ModelConfig(num_layers=2, layer_ids=(1, 3), depth=8).depth == 8


@pytest.mark.parametrize('text, tokens', [
    ('100M', 100_000_000), ('10M', 10_000_000), ('1B', 10**9), ('1e9', 10**9), ('2.2B', 2_200_000_000), ('4096', 4096),
    ('1_000', 1000)])
def test_token_budgets(text, tokens):
  assert c.parse_tokens(text) == tokens


def run(**train):
  return build(train={'batch_size': 512, **train}, data={'seq_len': 256})


def test_a_budget_counts_tokens_not_sequences():
  # 100e6 / (512 * 256) = 762.9; the paper's code divides by sequences and would do 195,312 (known fault O9).
  assert c.num_steps(run(tokens='100M'), num_rows=10**6) == 762


def test_a_budget_below_one_batch_is_refused():
  with pytest.raises(UserError, match='131072'):
    c.num_steps(run(tokens='131071'), num_rows=10**6)
  assert c.num_steps(run(tokens='131072'), num_rows=10**6) == 1


def test_epochs_drop_the_last_partial_batch():
  assert c.num_steps(run(epochs=3.0, batch_size=8), num_rows=9) == 3  # 27 rows, 3 left over
  with pytest.raises(UserError, match='less than one batch'):
    c.num_steps(run(epochs=1.0, batch_size=8), num_rows=3)


def test_batch_refusal_names_both_neighbours():
  with pytest.raises(UserError, match=r'10 .* 4 \(4 devices\); 8 or 12 would be'):
    c.check_batch('train.batch_size', 10, 4, '4 devices')
  with pytest.raises(UserError, match=r'2 .* 4 \(4 devices\); 4 would be'):
    c.check_batch('train.batch_size', 2, 4, '4 devices')
  c.check_batch('train.batch_size', 12, 4, '4 devices')


TOWER = {'family': 'tower', 'causal': False, 'patch_size': 4}


def tower_setting(name, value):
  built = c.ModelConfig(**{**TOWER, 'window_size': 96} | {name: value})
  assert getattr(built, name) == value and getattr(c.ModelConfig(**TOWER), name) != value


def leaves(cls=c.RunConfig, path=()):
  for f in dataclasses.fields(cls):
    if isinstance(f.type, type) and issubclass(f.type, c.Section):
      yield from leaves(f.type, (*path, f.name))
    else:
      yield (*path, f.name), f


@pytest.mark.parametrize('path, field', leaves(), ids=lambda v: '.'.join(v) if isinstance(v, tuple) else '')
def test_every_setting_has_a_meaning_and_changes_alone(path, field):
  assert field.metadata['doc'].endswith('.')
  values = c.defaults()
  values['train']['steps'] = 1000
  other = values
  for name in path[:-1]:
    other = other[name]
  choices = field.metadata['choices']
  by_type = {bool: not field.default, int: 24, float: 2.0 if field.metadata['above'] == 1.0 else 0.5, str: '1M'}
  by_type[str] = '10:13' if path[-1] == 'steps' else by_type[str]
  changed = list(choices)[-1] if choices else by_type.get(field.type, (3, 5))
  changed = '10:13' if path == ('profile', 'steps') else changed
  if field.metadata['family'] == ('tower',):  # which no run trains
    return tower_setting(path[-1], changed)
  values['model'] |= {**VIT, 'image_size': 48, 'patch_size': 24} if 'vit' in field.metadata['family'] else {}
  values['model'] |= VIT if path[-1] == 'causal' else {}
  values['model'] |= ENCODER if path[-1] == 'family' or field.metadata['family'] == ('encoder',) else {}
  other[path[-1]] = changed
  values['model'] |= {'num_layers': 2} if path[-1] == 'layer_ids' else {}
  values['model'] |= {'num_layers': 24} if path[-1] == 'mix_count' else {}
  values['model'] |= {'head_dim': 16} if path[-1] == 'rope_sections' else {}
  values['model'] |= {'max_positions': 24} if path[-1] == 'positions' else {}
  values['model'] |= {'sliding_window': 4} if path[-1] == 'window_layers' else {}
  values['model']['rope_scaling'] |= {'original_length': 24} if path[-1] == 'kind' else {}
  values['optimizer'] |= {'clip_norm': 1.0} if path[-1] == 'alpha_clip' else {}
  values['optimizer'] |= {'alpha_clip': 'apart'} if path[-1] == 'alpha_clip_norm' else {}
  values['model'] |= {'num_heads': 24} if path[-1] == 'num_kv_heads' else {}
  values['train'] |= {'steps': 0} if path[-1] in ('tokens', 'epochs') else {}
  values['optimizer'] |= {'name': 'adamw'} if path[-1] == 'weight_decay' else {}
  values['train'] |= {'batch_size': 24} if path[-1] == 'accumulation' else {}
  built = c.to_dict(c.from_dict(c.RunConfig, values))
  for name in path:
    built = built[name]
  assert built == (list(changed) if isinstance(changed, tuple) else changed)


@pytest.mark.parametrize('mesh, words', [
    ({'fsdp': -1}, 'mesh.data and mesh.fsdp are -1, .*set --config.mesh.data=1.'),
    ({'tensor': 0}, 'mesh.tensor = 0 .*; 1 does not use the axis')])
def test_a_mesh_that_nothing_can_fill_is_refused_with_what_to_set(mesh, words):
  with pytest.raises(UserError, match=words):
    build(mesh=mesh, train={'steps': 1})


@pytest.mark.parametrize('groups, platform, words', [
    ({'model': {'matmul': 'fp8'}}, 'cpu', 'fp8 on a CPU is emulated'), ({'model': {'matmul': 'fp8'}}, 'gpu', None),
    ({'model': {'matmul': 'fp8'}}, '', None),
    ({'model': {'microbatches': 4}}, '', 'model.microbatches = 4 is read by a pipeline alone'),
    ({'model': {'microbatches': 4, 'loop': 'scan'}, 'mesh': {'stage': 2}}, '', None)])
def test_settings_that_do_nothing_on_these_devices_are_one_warning(groups, platform, words):
  found = advice.warnings(build(**groups, train={'steps': 7}), platform)
  assert not found if words is None else len(found) == 1 and words in found[0]


def test_lns_with_a_depth_scaled_start_is_one_warning_that_names_both():
  for init in ('scaled', 'depth_scaled', 'mitchell'):
    (warning,) = advice.warnings(build(model={'scheme': 'lns', 'init': init}, train={'steps': 1}))
    assert 'lns' in warning and init in warning and '25.80' in warning
  assert not advice.warnings(build(model={'scheme': 'lns'}, train={'steps': 1}))
  assert not advice.warnings(build(model={'scheme': 'pre', 'init': 'scaled'}, train={'steps': 1}))


@pytest.mark.parametrize('settings, said', [
    ({'scheme': 'lns', 'qk_norm': 'head'}, True), ({'scheme': 'lns', 'qk_norm': 'full'}, True),
    ({'scheme': 'lns'}, False), ({'scheme': 'pre', 'qk_norm': 'head'}, False),
    ({'scheme': 'lns_init', 'qk_norm': 'head'}, True), ({'scheme': 'lns_learned', 'qk_norm': 'head'}, True),
    ({'scheme': 'res_norm', 'qk_norm': 'full'}, False), ({'scheme': 'branch_lns', 'qk_norm': 'head'}, False),
    ({'scheme': 'lns', 'qk_norm': 'head', 'p_attn': 0.0}, False),  # no factor there, nothing to undo
    ({'scheme': 'lns', 'qk_norm': 'head', 'norm': 'dyt'}, False)])  # no statistics that could undo it
def test_qk_norm_undoing_a_factor_is_one_line(settings, said):
  found = advice.warnings(build(model=settings, train={'steps': 1}))
  assert len(found) == said
  assert all(w in found[0] for w in ('lns', 'qk_norm', 'queries and keys', 'values', 'MLP')) if said else True


def test_mix_without_post_layers_is_said():
  model = {'scheme': 'mix', 'num_layers': 3, 'mix_fraction': 0.25}
  (warning,) = advice.warnings(build(model=model, train={'steps': 1}))
  assert 'no Post-LN layer' in warning
  assert not advice.warnings(build(model={'scheme': 'mix', 'num_layers': 3, 'mix_count': 1}, train={'steps': 1}))


@pytest.mark.parametrize('model, words', [
    ({'scheme': 'prores', 'num_layers': 4}, 'after 12 updates the branches of layer 4 have come to 0.3% of their size; 3 or'),
    ({'scheme': 'mix', 'num_layers': 4, 'mix_count': 1, 'mix_fraction': 0.5}, 'mix_fraction = 0.5, which is not read'),
    ({'scheme': 'mix', 'num_layers': 4, 'mix_count': 4}, 'all 4 layers Post-LN is post'),
])
def test_what_a_scheme_cannot_do_as_set_is_said(model, words):
  (warning,) = advice.warnings(build(model=model, train={'steps': 12}))
  assert words in warning


def test_a_ramp_that_ends_within_the_run_is_fine():
  assert not advice.warnings(build(model={'scheme': 'prores', 'num_layers': 4, 'prores_steps': 3}, train={'steps': 12}))


@pytest.mark.parametrize('scheme', schemes.SCHEMES)
def test_an_exponent_that_no_factor_reads_is_said(scheme):
  read = {'lns', 'lns_init', 'lns_learned', 'lns_stabilised', 'branch_lns', 'lns_before', 'lns_after_sum', 'res_norm_lns'}
  found = [w for w in advice.warnings(build(model={'scheme': scheme, 'p_attn': 0.25}, train={'steps': 1}))
           if 'p_attn = 0.25' in w and 'change nothing' in w]
  assert len(found) == (scheme not in read)


def test_the_stabilised_factor_says_that_two_layers_share_it():
  (warning,) = advice.warnings(build(model={'scheme': 'lns_stabilised'}, train={'steps': 1}))
  assert 'layers 1 and 2 the same factor' in warning


def test_an_init_that_a_scheme_overrides_is_said():
  (warning,) = advice.warnings(build(model={'scheme': 'deepnorm', 'init': 'scaled'}, train={'steps': 1}))
  assert 'deepnorm' in warning and 'scaled' in warning
  assert not advice.warnings(build(model={'scheme': 'deepnorm'}, train={'steps': 1}))


@pytest.mark.parametrize('model, words', [
    ({'scheme': 'lns', 'keel_alpha': 3.0}, ['keel_alpha = 3.0', 'keel alone', 'lns']),
    ({'scheme': 'pre', 'mix_count': 3}, ['mix_count = 3', 'mix alone']),
    ({'scheme': 'lns', 'prores_steps': 10}, ['prores_steps = 10', 'prores alone'])])
def test_a_setting_that_the_scheme_does_not_read_is_said(model, words):
  (warning,) = advice.warnings(build(model=model, train={'steps': 1}))
  assert all(w in warning for w in words)


def test_settings_of_learned_factors_without_any_are_said():
  optimizer = {'alpha_lr_ratio': 0.1}
  (warning,) = advice.warnings(build(model={'scheme': 'lns'}, optimizer=optimizer, train={'steps': 1}))
  assert 'alpha_lr_ratio = 0.1' in warning and 'lns has none' in warning
  for scheme in ('lns_learned', 'gpas', 'layerscale'):
    assert not advice.warnings(build(model={'scheme': scheme}, optimizer=optimizer, train={'steps': 1}))


def test_what_does_not_shrink_branches_gets_no_warning_with_a_depth_scaled_start():
  none = {'p_attn': 0.0, 'p_mlp': 0.0}
  quiet = ({'scheme': 'lns_before'}, {'scheme': 'lns', **none}, {'scheme': 'branch_lns', **none}, {'scheme': 'sandwich'})
  for model in quiet:
    assert not advice.warnings(build(model={**model, 'init': 'scaled'}, train={'steps': 1}))
  assert advice.warnings(build(model={'scheme': 'branch_lns', 'init': 'scaled'}, train={'steps': 1}))
