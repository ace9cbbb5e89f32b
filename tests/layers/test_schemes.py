"""Factors of the table against values by hand."""

import math

import pytest

from lns_jax.layers import schemes
from tiny import model


def factors(scheme, l, L, **settings):
  return schemes.factors(model(scheme=scheme, num_layers=L, **settings), l)


def start(scheme, field, L, l=1, **settings):
  """Where a learned factor starts: its constant times its parameter."""
  config = model(scheme=scheme, num_layers=L, **settings)
  entry, at = getattr(schemes.row(config, l), field), schemes.site(config, l, 'mlp')
  return entry.beside(at) * entry.start(at)


def test_lns_is_one_over_the_root_of_the_one_based_index():
  assert [factors('lns', l, 4)['attn'].s for l in (1, 2, 3, 4)] == pytest.approx([1, 0.70710678, 0.57735027, 0.5])
  assert factors('lns', 4, 4)['mlp'] == factors('lns', 4, 4)['attn']


@pytest.mark.parametrize('p_attn, p_mlp', [(0.25, 0.0), (0.5, 0.0), (0.0, 0.5)])
def test_exponents_of_attention_and_mlp_are_apart(p_attn, p_mlp):
  """Table 8's "attention norm only" is p_mlp = 0, "FFN norm only" p_attn = 0."""
  k = factors('lns', 4, 4, p_attn=p_attn, p_mlp=p_mlp)
  assert k['attn'].s == pytest.approx(4 ** -p_attn) and k['mlp'].s == pytest.approx(4 ** -p_mlp)


@pytest.mark.parametrize('scheme, field', [
    ('lns', 's'), ('lns_learned', 's'), ('branch_lns', 'b'), ('res_norm_lns', 'b'), ('lns_before', 'c'),
    ('lns_after_sum', 'post')])
def test_table_8_puts_one_factor_in_one_place(scheme, field):
  k = factors(scheme, 9, 9)['attn']
  assert {f: getattr(k, f) for f in schemes.FACTORS} == {f: (1 / 3 if f == field else 1.0) for f in schemes.FACTORS}


def test_the_stabilised_factor_of_the_second_seed():
  """1 / sqrt(max(i, 1) + 1e-3), i from 0."""
  found = [factors('lns_stabilised', l, 4)['attn'].s for l in (1, 2, 3, 4)]
  assert found == pytest.approx([1.001 ** -0.5, 1.001 ** -0.5, 2.001 ** -0.5, 3.001 ** -0.5])


@pytest.mark.parametrize('alpha', [1.0, 0.8])
def test_learned_alpha_starts_where_it_is_set(alpha):
  assert start('lns_learned', 's', 9, l=4, alpha_init=alpha) == pytest.approx(alpha / 2)


def test_the_gain_of_lns_init_starts_at_the_factor_and_nothing_else_differs_from_pre():
  config = model(scheme='lns_init', num_layers=9)
  row = schemes.row(config, 4)
  assert row.in_gain(schemes.site(config, 4, 'attn')) == 0.5
  assert factors('lns_init', 4, 9) == factors('pre', 4, 9)


@pytest.mark.parametrize('L, alpha', [(2, 1.4142136), (12, 2.2133638), (24, 2.6321480), (32, 2.8284271)])
def test_deepnorm_depends_on_depth(L, alpha):
  """Known fault N4; its beta is in test_init.py."""
  assert factors('deepnorm', 1, L)['mlp'].a == pytest.approx(alpha, abs=1e-7)


@pytest.mark.parametrize('L, settings, post', [
    (12, {}, 3), (24, {}, 6), (11, {}, 2), (3, {}, 0), (8, {'mix_fraction': 0.5}, 4), (8, {'mix_count': 5}, 5),
    (100, {'mix_fraction': 0.29}, 29), (100, {'mix_fraction': 0.57}, 57), (8, {'mix_count': 0}, 0),
    (8, {'mix_count': 8}, 8)])
def test_mix_is_post_below_and_pre_above(L, settings, post):
  config = model(scheme='mix', num_layers=L, **settings)
  rows = [schemes.row(config, l) for l in range(1, L + 1)]
  assert rows == [schemes.POST] * post + [schemes.PRE] * (L - post)


@pytest.mark.parametrize('L, expected', [(18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (36, 1e-6)])
def test_layerscale_starts_by_depth(L, expected):
  assert start('layerscale', 'b', L) == expected
  assert start('layerscale', 'b', L, layerscale_init=1e-4) == 1e-4


def test_skipinit_and_rezero_start():
  assert start('skipinit', 'b', 16) == 0.25
  assert start('rezero', 'b', 16) == 0.0


def test_keel_amplifies_the_stream_above_its_first_block():
  config = model(scheme='keel', num_layers=6)
  assert schemes.row(config, 1) == schemes.PRE and schemes.row(config, 2).out_norm and schemes.row(config, 2).in_norm
  assert factors('keel', 2, 6)['attn'].a == 6.0
  assert factors('keel', 2, 6, keel_alpha=2.5)['attn'].a == 2.5
  assert factors('keel', 1, 6)['attn'].a == 1.0


def test_prores_grows_layer_by_layer():
  """min(t / (T l), 1): with T = 1000, layer 3 is whole after 3000 updates."""
  assert factors('prores', 3, 6)['attn'].b * 1500 == pytest.approx(0.5)
  assert factors('prores', 3, 6, prores_steps=10)['mlp'].b * 30 == pytest.approx(1)
  assert schemes.grows(model(scheme='prores')) and not schemes.grows(model(scheme='lns'))


def test_completep_shrinks_branches_with_depth():
  assert factors('completep', 5, 16)['attn'].b == pytest.approx(1 / 8)
  assert factors('completep', 5, 16, base_depth=4, completep_alpha=0.5)['mlp'].b == pytest.approx(0.5)


def test_a_removed_layer_changes_no_other_layers_factor():
  assert factors('lns', 4, 3, layer_ids=(1, 2, 4), depth=4)['attn'].s == 0.5
  assert factors('deepnorm', 12, 2, layer_ids=(1, 12), depth=12)['attn'].a == pytest.approx(24 ** 0.25)
  mix = model(scheme='mix', num_layers=2, layer_ids=(3, 4), depth=12)
  assert schemes.row(mix, 3) == schemes.POST and schemes.row(mix, 4) == schemes.PRE


@pytest.mark.parametrize('scheme', schemes.SCHEMES)
def test_every_factor_is_a_finite_python_float(scheme):
  for l in range(1, 97):
    for k in factors(scheme, l, 96).values():
      assert all(type(v) is float and math.isfinite(v) for v in vars(k).values())


def test_a_gate_can_only_be_on_the_result():
  with pytest.raises(TypeError, match='post'):
    schemes.Row(in_norm=True, b=schemes.Gate())


@pytest.mark.parametrize('scheme', schemes.SCHEMES)
def test_a_scan_has_one_body_for_all_layers_of_a_row(scheme):
  """Rows are constants of the module: one that is built anew for each layer would compile each layer apart."""
  from lns_jax.models import layout
  assert len(layout.runs(model(scheme=scheme, num_layers=12))) == (2 if scheme in ('mix', 'keel') else 1)
