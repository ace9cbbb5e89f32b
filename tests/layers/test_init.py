"""Standard deviations of the start, measured on matrices of 1e5 entries or more, within 3 %."""

import jax
import numpy as np
import pytest

from lns_jax.config import ModelConfig
from lns_jax.models import transformer


def start(**settings):
  config = ModelConfig(vocab_size=512, d_model=384, d_ff=512, num_layers=4, num_heads=6, **settings)
  return jax.jit(lambda: transformer.init(config, jax.random.key(0)))()


def close(x, std):
  assert np.std(x) == pytest.approx(std, rel=0.03) and abs(np.mean(x)) < 0.03 * std


def test_normal_is_002_everywhere():
  for leaf in jax.tree.leaves(start()):
    if leaf.ndim > 1:
      close(leaf, 0.02)
    else:
      np.testing.assert_array_equal(leaf, 1)


def test_paper_has_the_large_embedding_of_the_published_runs():
  p = start(init='paper')
  close(p['embed']['table'], 0.6324555)
  close(p['head']['table'], 0.02)
  close(p['layers']['3']['mlp']['down'], 0.02)


@pytest.mark.parametrize('init, of_layer', [
    ('scaled', lambda l: 8 ** -0.5), ('depth_scaled', lambda l: (2 * l) ** -0.5)])
def test_scaled_starts_shrink_only_what_writes_to_the_stream(init, of_layer):
  p = start(init=init)
  for l in (1, 4):
    layer = p['layers'][str(l)]
    close(layer['attn']['o'], 0.02 * of_layer(l))
    close(layer['mlp']['down'], 0.02 * of_layer(l))
    close(layer['attn']['q'], 0.02)
    close(layer['mlp']['up'], 0.02)


def test_mitchell_is_olmos():
  """1 / sqrt(D) and, where the stream is written, 1 / sqrt(2 l fan_in); drawn within 3 standard deviations."""
  p = start(init='mitchell')
  cut = 0.98658  # std of a standard normal cut at 3
  close(p['embed']['table'], cut * 384 ** -0.5)
  for l in (1, 4):
    layer = p['layers'][str(l)]
    close(layer['attn']['q'], cut * 384 ** -0.5)
    close(layer['mlp']['gate'], cut * 384 ** -0.5)
    close(layer['attn']['o'], cut * (2 * 384 * l) ** -0.5)
    close(layer['mlp']['down'], cut * (2 * 512 * l) ** -0.5)
    assert np.abs(layer['mlp']['down']).max() <= 3 * (2 * 512 * l) ** -0.5


def test_truncated_is_the_normal_cut_at_three():
  p = start(init='truncated')
  assert 0.0599 < np.abs(p['embed']['table']).max() <= 0.06
  close(p['layers']['4']['mlp']['down'], 0.98658 * 0.02)


def test_completep_shrinks_the_start_of_blocks_with_width():
  p = start(scheme='completep', base_width=96)
  close(p['layers']['2']['mlp']['up'], 0.02 / 2)
  close(p['embed']['table'], 0.02)
  close(p['head']['table'], 0.02)


@pytest.mark.parametrize('settings', [{'scheme': 'deepnorm'}, {'init': 'deepnorm'}])
def test_deepnorm_gain_is_on_v_o_and_the_mlp(settings):
  """Known fault N4: beta = (8L)^(-1/4), and not on q and k."""
  attn = start(**settings)['layers']['2']['attn']
  close(attn['q'], (2 / (384 + 384)) ** 0.5)
  close(attn['k'], (2 / (384 + 384)) ** 0.5)
  assert np.std(attn['q']) / np.std(attn['v']) == pytest.approx((8 * 4) ** 0.25, rel=0.03)
  close(attn['o'], (8 * 4) ** -0.25 * (2 / 768) ** 0.5)
  close(start(**settings)['layers']['2']['mlp']['up'], (8 * 4) ** -0.25 * (2 / (384 + 512)) ** 0.5)


def test_gains_of_lns_init_start_at_the_factor():
  p = start(scheme='lns_init')
  for l in (1, 2, 4):
    for sub in ('attn', 'mlp'):
      np.testing.assert_allclose(p['layers'][str(l)][f'{sub}_in_norm']['gain'], l ** -0.5, rtol=1e-7)
  np.testing.assert_array_equal(p['final_norm']['gain'], 1)


def test_a_layers_start_depends_on_its_own_index_alone():
  small = ModelConfig(vocab_size=8, d_model=8, d_ff=8, num_layers=2, num_heads=2)
  large = ModelConfig(vocab_size=8, d_model=8, d_ff=8, num_layers=3, layer_ids=(1, 2, 9), num_heads=2, scheme='lns')
  a, b = (transformer.init(c, jax.random.key(1)) for c in (small, large))
  for l in '12':
    jax.tree.map(np.testing.assert_array_equal, a['layers'][l], b['layers'][l])
