"""Factors folded into weights: the same function, by hand and by logits; back again bit for bit; or refused by name."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.errors import UserError
from lns_jax.interop import fold as fold_lib
from lns_jax.interop.fold import fold, preimage, retrofit, unfold
from lns_jax.layers import schemes
from lns_jax.models import layout, transformer
from tiny import batch, model, params

TOKENS = batch(rows=2, T=8, vocab=64)['tokens']
NORMS = ('rmsnorm', 'layernorm', 'nonparametric_layernorm')
# What keeps each of the others from being a plain decoder, in the words of the sentence.
REFUSED = {
    'post': 'Post-LN', 'deepnorm': 'Post-LN', 'admin': 'Post-LN', 'lns_before': 'input of a norm', 'gpas': 'the sum',
    'lns_after_sum': 'the sum', 'sandwich': 'more than one place', 'peri': 'more than one place', 'mix': 'one kind',
    'keel': 'one kind', 'group_ln': 'groups',
}
# Schemes whose factors go elsewhere where the norm is another one; the rest of the table is in the slow tier.
OTHER_NORMS = ('lns', 'lns_init', 'lns_learned', 'res_norm_lns', 'completep', 'group_ln')
SETTINGS = {'completep': {'base_width': 16, 'base_depth': 1}, 'prores': {'ramp_step': 1500}}


def tiny(scheme, **changes):
  """Four layers, so that mix has a Post-LN one, and every bias there is."""
  sizes = {'num_layers': 4, 'd_model': 32, 'd_ff': 48}
  return model(**{'vocab_size': 64, 'scheme': scheme, 'bias': 'all', **sizes, **SETTINGS.get(scheme, {}), **changes})


def logits(config, p):
  return np.asarray(transformer.forward(config, p, TOKENS))


def bits(tree):
  return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize('scheme, norm', [
    (s, n) if n == 'rmsnorm' or s in OTHER_NORMS else pytest.param(s, n, marks=pytest.mark.slow)
    for s in schemes.SCHEMES for n in NORMS])
def test_the_plain_model_has_the_same_logits_or_the_scheme_is_refused(scheme, norm):
  try:
    config = tiny(scheme, norm=norm)
  except UserError:  # lns_init of a norm without a gain
    pytest.skip('there is no such model')
  p = params(config)
  if scheme in REFUSED or (scheme, norm) == ('res_norm_lns', 'nonparametric_layernorm'):
    words = REFUSED.get(scheme, 'norm that has no gain')
    with pytest.raises(UserError, match=f'model.scheme = {scheme} .*{words}.*: pre, lns, ') as error:
      fold(config, p)
    assert f', {scheme}' not in str(error.value).split('the schemes')[1]
    return
  plain, q, record = fold(config, p)
  assert plain.scheme == ('res_norm' if scheme.startswith('res') else 'pre') and plain.layer_ids == config.layer_ids
  assert not {name.split('/')[-1] for name in bits(q)} & schemes.LEARNED
  shapes = jax.tree.map(jnp.shape, transformer.init(plain, jax.random.key(0)))
  assert jax.tree.map(jnp.shape, q) == shapes, 'not the parameters of a plain model'
  assert json.loads(json.dumps(record)) == record and record['scheme'] == scheme
  wanted, found = logits(config, p), logits(plain, q)
  assert np.abs(found - wanted).max() <= 1e-5 and np.abs(wanted).max() > 0.5
  if scheme in ('lns', 'lns_learned', 'lns_stabilised') and norm != 'nonparametric_layernorm':
    np.testing.assert_array_equal(found, wanted)  # the same multiplications


def test_factors_that_go_to_the_gain():
  """Layer 4 of 4: 1 / sqrt(4) on gain and bias of both norms, and on nothing else; the first layer is untouched."""
  config = tiny('lns', norm='layernorm')
  p = params(config)
  q = fold(config, p)[1]
  for norm in ('attn_in_norm', 'mlp_in_norm'):
    for leaf in ('gain', 'bias'):
      np.testing.assert_array_equal(q['layers']['4'][norm][leaf], p['layers']['4'][norm][leaf] / 2)
  changed = {name for name, b in bits(q).items() if b != bits(p)[name]}
  assert changed == {f"['layers']['{l}']['{sub}_in_norm']['{leaf}']"
                     for l in '234' for sub in schemes.SUBLAYERS for leaf in ('gain', 'bias')}


def test_the_exponent_of_each_sublayer_counts():
  config = tiny('lns', p_attn=1.0, p_mlp=0.0)
  p = params(config)
  layer = fold(config, p)[1]['layers']['4']
  np.testing.assert_array_equal(layer['attn_in_norm']['gain'], p['layers']['4']['attn_in_norm']['gain'] / 4)
  np.testing.assert_array_equal(layer['mlp_in_norm']['gain'], p['layers']['4']['mlp_in_norm']['gain'])


def test_a_learned_alpha_goes_with_its_factor():
  config = tiny('lns_learned')
  p = params(config)
  layer = p['layers']['3']
  wanted = np.float64(layer['mlp_in_norm']['gain']) * np.float64(layer['mlp_s']) / np.sqrt(3)
  np.testing.assert_allclose(fold(config, p)[1]['layers']['3']['mlp_in_norm']['gain'], wanted, rtol=2e-7)


def test_without_a_gain_the_factor_goes_to_the_rows_that_read_the_norm():
  config = tiny('lns', norm='nonparametric_layernorm')
  p = params(config)
  q, layer = fold(config, p)[1]['layers']['4'], p['layers']['4']
  for name in 'qkv':
    np.testing.assert_array_equal(q['attn'][name], layer['attn'][name] / 2)
    np.testing.assert_array_equal(q['attn'][f'{name}_bias'], layer['attn'][f'{name}_bias'])
  for name in ('gate', 'up'):
    np.testing.assert_array_equal(q['mlp'][name], layer['mlp'][name] / 2)
  np.testing.assert_array_equal(q['mlp']['down'], layer['mlp']['down'])


def test_a_factor_of_each_channel_goes_to_the_columns_that_write_it():
  """LayerScale: o [H, h, D] and down [F, D] by D, their biases too."""
  config = tiny('layerscale')
  p = params(config)
  q, layer = fold(config, p)[1]['layers']['2'], p['layers']['2']
  for sub, name in (('attn', 'o'), ('mlp', 'down')):
    scale = np.asarray(layer[f'{sub}_b'])
    np.testing.assert_array_equal(q[sub][name], layer[sub][name] * scale)
    np.testing.assert_array_equal(q[sub][f'{name}_bias'], layer[sub][f'{name}_bias'] * scale)


def test_a_factor_behind_a_norm_goes_to_its_gain():
  config = tiny('res_norm_lns')
  p = params(config)
  q = fold(config, p)[1]['layers']['4']
  np.testing.assert_array_equal(q['mlp_res_norm']['gain'], p['layers']['4']['mlp_res_norm']['gain'] / 2)


def test_completep_has_factors_on_branches_and_before_the_head():
  """Four layers tuned at one, width 32 tuned at 16."""
  config = tiny('completep')
  p = params(config)
  plain, q, record = fold(config, p)
  np.testing.assert_array_equal(q['layers']['1']['mlp']['down'], p['layers']['1']['mlp']['down'] / 4)
  np.testing.assert_array_equal(q['final_norm']['gain'], p['final_norm']['gain'] / 2)
  assert record['final'] == 0.5 and plain == tiny('pre')
  tied = tiny('completep', norm='nonparametric_layernorm', tie_embeddings=True)
  with pytest.raises(UserError, match='model.scheme = completep .* tied head'):
    fold(tied, params(tied))


def test_a_growing_factor_has_the_value_of_its_step():
  """After 1500 updates with T = 1000 layer 3 has half of its branch; a finished model has all of it."""
  config = tiny('prores')
  p = params(config)
  down = p['layers']['3']['mlp']['down']
  np.testing.assert_array_equal(fold(config, p)[1]['layers']['3']['mlp']['down'], down / 2)
  finished = dataclasses.replace(config, ramp_step=-1)
  np.testing.assert_array_equal(fold(finished, p)[1]['layers']['3']['mlp']['down'], down)


def test_every_layer_of_a_pruned_model_keeps_its_own_factor():
  config = tiny('lns')
  less, p = transformer.remove_layers(config, params(config), [1, 2])
  plain, q, record = fold(less, p)
  np.testing.assert_array_equal(q['layers']['4']['mlp_in_norm']['gain'], p['layers']['4']['mlp_in_norm']['gain'] / 2)
  np.testing.assert_array_equal(logits(plain, q), logits(less, p))
  assert record['layer_ids'] == [3, 4] and record['folded']['4']['mlp_in_norm/gain'] == 0.5


def test_mix_without_a_post_layer_is_plain_and_a_post_encoder_too():
  config = tiny('mix', mix_count=0)
  assert fold(config, params(config))[0] == tiny('pre')
  encoder = tiny('post', causal=False)
  assert fold(encoder, params(encoder))[0] == encoder
  with pytest.raises(UserError, match='model.norm = dyt'):
    fold(tiny('pre', norm='dyt'), {})


def test_a_new_row_folds_by_what_it_says(monkeypatch):
  row = schemes.Row(in_norm=True, s=schemes.power, b=schemes.Learned(start=lambda at: 0.3))
  monkeypatch.setitem(schemes.SCHEMES, 'new', row)
  monkeypatch.setitem(schemes.SCHEMES, 'newer', dataclasses.replace(row, post=lambda at: 0.5))
  config = tiny('new')
  p = params(config)
  plain, q, _ = fold(config, p)
  np.testing.assert_allclose(logits(plain, q), logits(config, p), atol=1e-5, rtol=0)
  with pytest.raises(UserError, match='scheme = newer .*the sum'):
    fold(tiny('newer'), p)


def test_the_scanned_layout_folds_to_the_same_bits():
  config = tiny('layerscale')
  scanned = dataclasses.replace(config, loop='scan')
  p = params(config)
  plain, q, _ = fold(scanned, layout.native(p, scanned))
  assert layout.is_stacked(q['layers']) and plain.loop == 'scan'
  assert bits(layout.unstack(q)) == bits(fold(config, p)[1])


def test_a_bfloat16_gain_times_its_factor_is_not_rounded_to_bfloat16():
  config = tiny('lns')
  p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(config))
  q = fold(config, p)[1]
  gain = np.float32(p['layers']['3']['mlp_in_norm']['gain'])
  np.testing.assert_array_equal(q['layers']['3']['mlp_in_norm']['gain'], gain * np.float32(3 ** -0.5))
  assert q['layers']['3']['mlp']['down'].dtype == jnp.bfloat16


@pytest.mark.parametrize('scheme', ['lns', 'lns_stabilised', 'branch_lns', 'res_norm_lns', 'completep', 'lns_init'])
@pytest.mark.parametrize('norm', ['rmsnorm', 'layernorm'])
def test_fold_unfold_fold_is_bit_for_bit(scheme, norm):
  """The way of an export that is imported and exported again; the layers come back as 1..n."""
  config = tiny(scheme, norm=norm)
  config, p = transformer.remove_layers(config, params(config), [2])
  plain, q, record = fold(config, p)
  names = dict(zip(config.layer_ids, '123', strict=True))
  fresh = dataclasses.replace(plain, layer_ids=(1, 2, 3), depth=3)
  numbered = {**q, 'layers': {names[int(l)]: layer for l, layer in q['layers'].items()}}
  again, r = unfold(fresh, numbered, json.loads(json.dumps(record)))
  assert again == config
  assert np.abs(logits(again, r) - logits(config, p)).max() <= 1e-5
  assert bits(fold(again, r)[1]) == bits(q)


@pytest.mark.parametrize('scheme', ['lns_learned', 'rezero', 'prores'])
def test_factors_that_training_moves_stay_in_the_weights(scheme, caplog):
  config = tiny(scheme)
  plain, q, record = fold(config, params(config))
  again, r = unfold(plain, q, record)
  assert again == plain and bits(r) == bits(q) and f'Scheme {scheme} was folded' in caplog.text


@pytest.mark.parametrize('harm', [lambda r: r.pop('depth'), lambda r: r['layer_ids'].pop(),
                                  lambda r: r.update(scheme='lnss'), lambda r: r['settings'].update(p=1)])
def test_a_damaged_record_is_a_sentence(harm):
  config = tiny('lns')
  plain, q, record = fold(config, params(config))
  harm(record)
  with pytest.raises(UserError):
    unfold(plain, q, record)


def test_a_preimage_is_found_wherever_there_is_one():
  """Every float32 near g was tried in float32: what any of them gives, `preimage` gives."""
  rng = np.random.default_rng(0)
  for l in (2, 3, 7, 12, 32, 100):
    k = np.float32(l ** -0.5)
    h = rng.uniform(0.5, 8, 20_000).astype(np.float32) * rng.choice(np.float32([-1, 1]), 20_000)
    close = h / k
    exists = np.zeros(h.shape, bool)
    near = close
    for _ in range(4):
      near = np.nextafter(near, np.float32(-np.inf))
    for _ in range(9):
      exists |= near * k == h
      near = np.nextafter(near, np.float32(np.inf))
    found = preimage(h, k)
    assert found.dtype == np.float32 and (found * k == h)[exists].all() and exists.mean() > 0.6
    assert (np.abs(found * k - h) <= np.spacing(np.abs(h))).all()
    made = rng.standard_normal(20_000).astype(np.float32) * k  # of a gain, so that there is one
    np.testing.assert_array_equal(preimage(made, k) * k, made)
  assert preimage(np.float32([0]), np.float32(0.5)) == 0


@pytest.mark.parametrize('of, scheme', [('pre', 'lns'), ('pre', 'branch_lns'), ('res_norm', 'res_norm_lns')])
def test_a_retrofit_has_the_function_that_it_had(of, scheme):
  config = tiny(of)
  p = params(config)
  new, q = retrofit(config, p, scheme)
  assert new == dataclasses.replace(config, scheme=scheme)
  assert np.abs(logits(new, q) - logits(config, p)).max() <= 1e-5
  if scheme == 'lns':
    gain = np.float64(p['layers']['3']['attn_in_norm']['gain'])
    np.testing.assert_allclose(q['layers']['3']['attn_in_norm']['gain'], gain * np.sqrt(3), rtol=2e-7)


def test_a_retrofit_that_would_change_the_function_is_refused():
  config = tiny('pre')
  for scheme, words in (('lns_learned', "'lns' has fixed"), ('res_norm_lns', "'res_norm' with"), ('post', 'Post-LN'),
                        ('lns_before', 'input of a norm')):
    with pytest.raises(UserError, match=words):
      retrofit(config, params(config), scheme)
  with pytest.raises(UserError, match="this model has scheme 'lns'"):
    retrofit(tiny('lns'), params(tiny('lns')))


def test_what_can_be_folded_is_said_of_the_model_at_hand():
  assert 'lns_init' not in fold_lib._foldable(tiny('pre', norm='nonparametric_layernorm'))
