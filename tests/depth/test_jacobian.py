"""Jacobians against those that jax.jacfwd writes out, and against what is known without computing them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.depth.jacobian import _sizes, jacobian
from lns_jax.errors import UserError
from lns_jax.models import layout
from materialised import SMALL, by_row, small_batch, without_layer_2
from tiny import batch, model, params

EXACT = dict(iterations=32, probes=64)  # T D = 48


@pytest.fixture(scope='module')
def case():
  """Layers 1, a Post-LN one, and 3 and 4 in a scanned loop; two documents a row, and padding."""
  return *without_layer_2(scheme='mix', mix_count=2, loop='scan'), small_batch()


def norms(matrices):
  """(spectral norms, squared Frobenius norms) of a list of matrices."""
  s = [np.linalg.svd(m, compute_uv=False) for m in matrices]
  return np.array([v[0] for v in s]), np.array([np.sum(v ** 2) for v in s])


def test_every_size_is_that_of_the_matrix_written_out(case):
  config, p, b = case
  found = jacobian(config, p, [b], **EXACT)
  rows = by_row(config, p, b)
  sizes = np.array([len(r[0]) for r in rows])
  less = lambda m: m - np.eye(len(m))
  for i in range(config.num_layers):
    largest, total = norms([r[i] for r in rows])
    assert found['spectral'].value[i] == pytest.approx(largest.mean(), rel=1e-4)
    assert found['frobenius'].value[i] == pytest.approx(np.sqrt(total.sum() / sizes.sum()), rel=1e-5)
    largest, total = norms([less(r[i]) for r in rows])
    assert found['distance_spectral'].value[i] == pytest.approx(largest.mean(), rel=1e-4)
    assert found['distance'].value[i] == pytest.approx(np.sqrt(total.sum() / sizes.sum()), rel=1e-5)
    suffixes = [np.linalg.multi_dot([*r[i:][::-1], np.eye(len(r[0]))]) for r in rows]
    largest, total = norms(suffixes)
    assert found['suffix_frobenius'].value[i] == pytest.approx(np.sqrt(total.sum() / sizes.sum()), rel=1e-5)
    if i == 0:
      assert found['end_to_end'].value == pytest.approx(largest.mean(), rel=1e-4)
  product = np.prod([norms(r)[0] for r in rows], axis=1)
  assert found['spectral_product'].value == pytest.approx(product.mean(), rel=1e-4)
  assert found['spectral'].tokens == len(rows) and found['distance'].tokens == sizes.sum()
  for name in ('spectral', 'distance', 'end_to_end'):
    assert (found[name].low <= found[name].value).all() and (found[name].value <= found[name].high).all()
    assert (found[name].low < found[name].high).all()


def test_a_block_that_does_nothing_is_the_identity(case):
  config, p, b = case
  p = layout.unstack(p)
  p['layers']['3']['attn']['o'] *= 0
  p['layers']['3']['mlp']['down'] *= 0
  found = jacobian(config, p, [b], **EXACT)
  assert found['distance'].value[1] == 0.0 and found['distance_spectral'].value[1] == 0.0
  assert found['spectral'].value[1] == pytest.approx(1.0, abs=1e-6)
  assert found['frobenius'].value[1] == pytest.approx(1.0, abs=1e-6)
  np.testing.assert_allclose(found['spectrum'].value[1], 1.0, atol=1e-6)
  assert found['suffix_frobenius'].value[1] == pytest.approx(found['suffix_frobenius'].value[2], rel=1e-6)
  assert (found['distance'].value[[0, 2]] > 0.01).all()


def test_padding_has_no_part(case):
  """Neither other tokens there nor rows of padding alone change a digit."""
  config, p, b = case
  once = jacobian(config, p, [b], **EXACT)
  pad = {k: np.where(b['segment_ids'] > 0, v, 7) if k == 'tokens' else v for k, v in b.items()}
  empty = b | {'segment_ids': np.zeros_like(b['segment_ids'])}
  again = jacobian(config, p, [pad, empty], **EXACT)
  for name in once:
    np.testing.assert_array_equal(once[name].value, again[name].value)
  with pytest.raises(UserError, match='no valid tokens'):
    jacobian(config, p, [empty], **EXACT)


POST = model(**SMALL, num_layers=1, scheme='post')
SHORT = dict(iterations=8, probes=64)


def test_the_size_of_batches_changes_nothing():
  """Starts belong to a sequence's number in the sample: eight iterations do not forget theirs."""
  p, b = params(POST), small_batch()
  whole = jacobian(POST, p, [b], **SHORT)
  parts = jacobian(POST, p, [{k: v[i:i + 1] for k, v in b.items()} for i in range(3)], **SHORT)
  for name in whole:
    np.testing.assert_allclose(parts[name].value, whole[name].value, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(parts[name].high, whole[name].high, rtol=1e-3, atol=1e-5)
  assert (whole['spectral_residual'].value > 1e-3).all()


def test_of_a_post_norm_block_without_branches_all_is_known():
  """y = x / rms(x): the Jacobian of a token is (I - u u^T) / rms with u = x / |x|; the second norm is (I - u u^T).

  A singular value for each token and 0 are 7, which eight iterations know.
  """
  p, b = params(POST, random_gains=False), small_batch()
  p['layers']['1']['attn']['o'] *= 0
  p['layers']['1']['mlp']['down'] *= 0
  found = jacobian(POST, p, [b], **SHORT)
  x = np.asarray(p['embed']['table'], np.float64)[b['tokens']]
  scale = np.sqrt(np.mean(x ** 2, axis=-1) + POST.norm_eps)
  real, D = b['segment_ids'] > 0, POST.d_model
  assert found['spectral'].value[0] == pytest.approx(np.max(1 / scale * real, axis=1).mean(), rel=1e-3)
  assert found['end_to_end'].value == pytest.approx(found['spectral'].value[0], rel=1e-3)
  share = lambda total: np.sqrt(total[real].sum() / (D * real.sum()))
  assert found['frobenius'].value[0] == pytest.approx(share((D - 1) / scale ** 2), rel=1e-3)
  assert found['distance'].value[0] == pytest.approx(share((D - 1) * (1 / scale - 1) ** 2 + 1), rel=1e-3)


def test_one_program_whatever_the_depth_and_nothing_of_the_size_of_the_jacobian():
  T, texts = 64, []
  for L in (3, 6):
    config = model(**SMALL, num_layers=L, scheme='lns')
    p, b = layout.stack(params(config), config), batch(rows=1, T=T)
    texts.append(_sizes.lower(config, p, b, 0, 0, 4, 2).as_text())
  assert len(texts[0].splitlines()) == len(texts[1].splitlines())
  sizes = [np.prod([int(n) for n in dims[:-1].split('x')]) for dims in re.findall(r'tensor<((?:\d+x)+)', texts[1])]
  assert max(sizes) == config.num_heads * T * T  # attention's weights; the Jacobian has 32 times that
  assert (T * config.d_model) ** 2 == 32 * max(sizes)


def test_what_cannot_be_measured_is_said(case):
  config, p, b = case
  with pytest.raises(UserError, match='no batches'):
    jacobian(config, p, [])
  with pytest.raises(UserError, match='iterations is 0'):
    jacobian(config, p, [b], iterations=0)
  with pytest.raises(UserError, match='power of two'):
    jacobian(config, p, [b], probes=3)
  broken = layout.unstack(p)
  broken['layers']['3']['mlp']['down'] = broken['layers']['3']['mlp']['down'].at[0, 0].set(jnp.nan)
  with pytest.raises(UserError, match='the weight layers/3/mlp/down is not finite'):
    jacobian(config, broken, [b], **EXACT)
