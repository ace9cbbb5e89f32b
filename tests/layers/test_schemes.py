"""Factors of the table against values by hand."""

import math

import pytest

from lns_jax.layers import block, schemes
from tiny import model


def test_lns_is_one_over_the_root_of_the_one_based_index():
  config = model(scheme='lns', num_layers=4)
  assert [block.factors(config, l)['attn'].s for l in (1, 2, 3, 4)] == pytest.approx([1, 0.70710678, 0.57735027, 0.5])
  assert block.factors(config, 4)['mlp'] == block.factors(config, 4)['attn']


def test_exponents_of_attention_and_mlp_are_apart():
  config = model(scheme='lns', num_layers=4, p_attn=0.25, p_mlp=0.0)
  k = block.factors(config, 4)
  assert k['attn'].s == pytest.approx(4 ** -0.25) and k['mlp'].s == 1.0


@pytest.mark.parametrize('scheme, field', [
    ('lns', 's'), ('branch_lns', 'b'), ('lns_before', 'c'), ('lns_after_sum', 'post')])
def test_table_8_puts_one_factor_in_one_place(scheme, field):
  k = block.factors(model(scheme=scheme, num_layers=9), 9)['attn']
  assert {f: getattr(k, f) for f in schemes.FACTORS} == {f: (1 / 3 if f == field else 1.0) for f in schemes.FACTORS}


@pytest.mark.parametrize('L, alpha, beta', [
    (2, 1.4142136, 0.5), (12, 2.2133638, 0.3194716), (24, 2.6321480, 0.2686425), (32, 2.8284271, 0.25)])
def test_deepnorm_depends_on_depth(L, alpha, beta):
  row = schemes.SCHEMES['deepnorm']
  assert schemes.factors(row, 1, L, 0.5).a == pytest.approx(alpha, abs=1e-7)
  assert row.xavier_gain(1, L, 0.5) == pytest.approx(beta, abs=1e-7)


@pytest.mark.parametrize('L, fraction, post', [(12, 0.25, 3), (24, 0.25, 6), (11, 0.25, 2), (3, 0.25, 0), (8, 0.5, 4)])
def test_mix_is_post_below_and_pre_above(L, fraction, post):
  rows = [schemes.row('mix', l, L, fraction) for l in range(1, L + 1)]
  assert rows == [schemes.POST] * post + [schemes.PRE] * (L - post)


def test_a_removed_layer_changes_no_other_layers_factor():
  config = model(scheme='lns', num_layers=3, layer_ids=(1, 2, 4), depth=4)
  assert block.factors(config, 4)['attn'].s == 0.5
  deep = model(scheme='deepnorm', num_layers=2, layer_ids=(1, 12), depth=12)
  assert block.factors(deep, 12)['attn'].a == pytest.approx(24 ** 0.25)
  mix = model(scheme='mix', num_layers=2, layer_ids=(3, 4), depth=12)
  assert block.row(mix, 3) == schemes.POST and block.row(mix, 4) == schemes.PRE


@pytest.mark.parametrize('scheme', schemes.SCHEMES)
def test_every_factor_is_a_finite_python_float(scheme):
  for l in range(1, 97):
    k = schemes.factors(schemes.row(scheme, l, 96, 0.25), l, 96, 0.5)
    assert all(type(v) is float and math.isfinite(v) for v in vars(k).values())
