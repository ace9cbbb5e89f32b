"""The paper's formulas against hand calculation, closed forms, and fresh models whose matrices are what it assumes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from lns_jax import depth
from lns_jax.depth import theory
from lns_jax.errors import UserError
from lns_jax.models import layout, transformer
from tiny import model, params

L = 10 ** 5
l = np.arange(1, L + 1.0)


def test_the_literal_recursions():
  """By hand: 1, 1 + 1, 2 + sqrt(2). paper.md 4.8.1: L^2 / 4 for Pre-LN, exactly L for LNS."""
  np.testing.assert_allclose(theory.lemma_3_2(3), [1, 2, 2 + 2 ** 0.5])
  np.testing.assert_allclose(theory.lemma_3_2(3, 4), [4, 6, 6 + 6 ** 0.5])
  assert theory.lemma_3_2(L)[-1] == pytest.approx(L ** 2 / 4, rel=1e-3)
  np.testing.assert_allclose(theory.lemma_4_1(L), l, rtol=1e-12)
  np.testing.assert_allclose(theory.lemma_4_1(3, 4), [4, 6, 6 + 3 ** 0.5])


def test_the_ranges_meet_at_the_start():
  low, high = theory.lemma_3_2_range(3, 2.0)
  np.testing.assert_allclose([low, high], [[2, 4, 6], [2, 2 * np.e, 2 * np.e ** 2]])
  low, high = theory.lemma_4_1_range(4, 2.0, eps=0.75)
  np.testing.assert_allclose([low, high], [[2, 4, 6, 8], 2 * np.arange(1, 5) ** 1.25])
  v = theory.lemma_3_2(40)
  low, high = theory.lemma_3_2_range(40)
  assert (low <= v).all() and (v <= high).all()


def test_the_sum_of_the_branches():
  """By hand: 4 + 1 + 0.5 * 2 * 1 = 6, then + 9 + 1 * sqrt(6) * 3. paper.md 4.8.2 where the correlations are 0."""
  np.testing.assert_allclose(theory.residual_variance(4, [1], [9], 0.5, 1.0), [4, 15 + 3 * 6 ** 0.5])
  n = np.arange(1, 51.0)
  np.testing.assert_allclose(theory.residual_variance(1, np.full(50, 2), 1), 1 + 3 * np.arange(51))
  harmonic = special.digamma(n + 1) + np.euler_gamma
  np.testing.assert_allclose(theory.residual_variance(1, 1 / n, 0)[1:], 1 + harmonic)
  np.testing.assert_allclose(theory.residual_variance(1, np.full(50, 4), 9, 2, 2), (1 + 5 * np.arange(51)) ** 2)


def test_the_bounds_by_hand():
  """sigma 1 and 2, A = 2, B = 3: (1 + 2 + 3) (1 + 1 + 3/4) for Pre-LN, (1 + 2 + 3) (1 + 1/2 + 3/16) for LNS."""
  np.testing.assert_allclose(np.exp(theory.theorem_3_3([1, 4], 2, 3)), [6, 16.5])
  np.testing.assert_allclose(np.exp(theory.theorem_4_2([1, 4], 2, 3)), [6, 6 * 1.6875])
  np.testing.assert_allclose(theory.theorem_4_3([1, 4], 2, 3), theory.theorem_4_2([1, 4], 2, 3))
  np.testing.assert_allclose(np.exp(theory.theorem_3_3([[1, 4], [4, 1]], 2, 3)), [[6, 16.5], [2.75, 16.5]])
  np.testing.assert_allclose(np.exp(theory.theorem_3_3([1, 4], [2, 0], [3, 4])), [6, 12])


def test_what_the_bounds_do_at_great_depth():
  """paper.md 4.8.3 and 4.8.4: exp(2 sqrt(L)) for sigma^2 = l; Theorem 4.2 converges, as Theorem 3.3 for exp(l)."""
  assert theory.theorem_3_3(l)[-1] == pytest.approx(2 * L ** 0.5, rel=0.01)
  assert [round(theory.theorem_4_2(l ** p)[-1], 2) for p in (1, 1.25, 1.5)] == [2.77, 2.37, 2.11]
  assert theory.theorem_3_3(np.exp(l[:600]))[-1] == pytest.approx(1.69, abs=0.005)


@pytest.mark.parametrize('A, B', [(1.0, 1.0), (0.5, 2.0)])
def test_the_limit_as_printed_is_a_sum_of_geometric_series(A, B):
  """log(1 + u) cut after u - u^2 / 2, with u = A e^-k + B e^-2k."""
  k = np.arange(1, 60)
  u = A * np.exp(-k) + B * np.exp(-2.0 * k)
  assert theory.theorem_3_3_limit(A, B) == pytest.approx(np.sum(u - u ** 2 / 2))


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_sigma_is_measured_with_the_gains_in_it(loop):
  config = model(num_layers=3, loop=loop, bias='qkv', qk_norm='head')
  p, found = layout.unstack(params(config)), theory.constants(config, params(config), s=16)
  every = []
  for i in range(3):
    of = jax.tree.map(lambda w: np.asarray(w, np.float64), p['layers'][str(i + 1)])
    read = [np.einsum('d,d...->d...', of[f'{sub}_in_norm']['gain'], of[sub][name])
            for sub, name in (('attn', 'q'), ('attn', 'k'), ('attn', 'v'), ('mlp', 'gate'), ('mlp', 'up'))]
    every.append(np.concatenate([w.ravel() for w in (*read, of['attn']['o'], of['mlp']['down'])]))
  np.testing.assert_allclose(found.sigma, [w.std() for w in every], rtol=1e-12)
  assert found.pooled == pytest.approx(np.concatenate(every).std(), rel=1e-12)
  assert (found.d, found.d_ffn, found.h, found.d_head, found.s) == (64, 128, 4, 16, 16)
  cut = theory.constants(*transformer.remove_layers(config, params(config), [2]), s=16)
  np.testing.assert_allclose(cut.sigma, found.sigma[[0, 2]])


def test_sigma_in_bfloat16_is_that_of_its_values():
  config, p = model(norm='nonparametric_layernorm'), params(model(), random_gains=False)
  half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
  wide = jax.tree.map(lambda w: w.astype(jnp.float32), half)
  np.testing.assert_array_equal(theory.constants(config, half, 8).sigma, theory.constants(config, wide, 8).sigma)


def test_a_weight_that_is_not_finite_is_named():
  config = model()
  p = params(config)
  p['layers']['2']['mlp']['up'] = p['layers']['2']['mlp']['up'].at[3, 4].set(jnp.nan)
  with pytest.raises(UserError, match='layers/2/mlp/up has a weight'):
    theory.constants(config, p, 8)


def by_hand(d=64, d_ffn=144, h=4, d_head=16, s=16, sigma=0.5):
  """Lemma A.2 where h d_head = d, as paper.md 4.7 gives it: sqrt(s) + 2 + 1 / sqrt(s) is 6.25 for s = 16."""
  softmax = (s ** 0.5 + 2 + s ** -0.5) * sigma ** 2 * d * d_head ** 0.5
  return sigma ** 2 * (8 + 12) ** 2, 2 * d * h * sigma ** 2 * (softmax + 1 + 0.5), 2 * d * h * (softmax + 1.5)


def test_the_constants_by_hand():
  found = theory.Constants(np.array([0.5]), 0.5, 64, 144, 4, 16, 16)
  ffn, attn, without_sigma = by_hand()
  assert ffn == 100 and attn == 128 * (6.25 * 16 * 4 + 1.5)
  np.testing.assert_allclose((found.ffn, found.attn), [[ffn], [attn]])
  np.testing.assert_allclose((found.A, found.B), [[ffn + attn], [ffn * attn]])
  np.testing.assert_allclose(found.printed, [[ffn + without_sigma], [512 * 0.25 * 400]])
  wide = dataclasses.replace(found, d_head=64)  # |W_O| is sigma (sqrt(d) + sqrt(h d_head)) = 0.5 * 24
  np.testing.assert_allclose(wide.attn, 12 * 4 * (6.25 * 0.125 * 64 ** 2 + 0.5 * 16))


def test_the_spectral_norm_of_random_matrices_is_what_the_constants_take_it_for():
  rng = np.random.default_rng(0)
  up, down = 0.5 * rng.normal(size=(144, 64)), 0.5 * rng.normal(size=(64, 144))
  norm = np.linalg.norm(up, 2) * np.linalg.norm(down, 2)
  assert norm == pytest.approx(theory.Constants(np.array(0.5), 0.5, 64, 144, 4, 16, 16).ffn, rel=0.1)


def test_a_models_bound_is_the_theorem_of_its_scheme():
  """Theorem 3.3 for pre, 4.2 for lns; layers keep their own l when others are removed."""
  variance = np.array([0.5, 1.0, 3.0, 7.0])
  for scheme, theorem in (('pre', theory.theorem_3_3), ('lns', theory.theorem_4_2)):
    config = model(num_layers=3, scheme=scheme)
    found = theory.constants(config, params(config), 16)
    np.testing.assert_allclose(theory.log_jacobian_bound(config, found, variance),
                               theorem(variance[:3], found.A, found.B))
  cut, p = transformer.remove_layers(config, params(config), [1, 2])
  found = theory.constants(cut, p, 16)
  np.testing.assert_allclose(theory.log_jacobian_bound(cut, found, np.stack([variance[:2]] * 2)), np.log1p(
      found.A / 3 / 0.5 ** 0.5 + found.B / 9 / 0.5) * np.ones((2, 1)))


@pytest.mark.parametrize('changes', [
    {'scheme': 'pre', 'loop': 'scan'}, {'scheme': 'lns', 'mlp': 'gelu', 'norm': 'layernorm', 'loop': 'scan'},
    {'scheme': 'branch_lns'}])
def test_a_fresh_model_has_the_variance_of_independent_branches(changes):
  """Matrices are normal and independent at the start, and a single token averages over nothing: Assumption 3.1."""
  config = model(num_layers=4, d_model=256, d_ff=512, num_heads=8, **changes)
  p = params(config, random_gains=False)
  tokens = np.arange(64, dtype=np.int32)[:, None]
  measured = depth.variance(config, p, [{'tokens': tokens}]).value
  found = theory.constants(config, p, 1)
  assert found.pooled == pytest.approx(0.1, rel=0.01)
  predicted = theory.predicted_variance(config, found, measured[0])
  np.testing.assert_allclose(predicted['independent'], measured, rtol=0.1)
  assert (predicted['aligned'][1:] > measured[1:]).all()
  s = np.arange(1, 5) ** (0.0 if changes['scheme'] == 'pre' else -0.5)
  step = np.diff(predicted['lemma']) / np.sqrt(predicted['lemma'][:-1])
  np.testing.assert_allclose(step, s)


@pytest.mark.parametrize('mlp, activation', [
    ('swiglu', jax.nn.silu), ('gelu', lambda u: jax.nn.gelu(u, approximate=False))])
@pytest.mark.parametrize('sigma', [0.01, 0.1, 1.0])
def test_the_branch_of_a_random_mlp(mlp, activation, sigma):
  """Against the integral over a normal pre-activation of standard deviation tau = sigma sqrt(d), on a fine grid."""
  found = theory.Constants(np.full(2, sigma), sigma, 64, 128, 4, 16, 8)
  z, tau = np.linspace(-12, 12, 20001), 8 * sigma
  density = np.exp(-z ** 2 / 2) / np.sqrt(2 * np.pi)
  square = np.trapezoid(density * np.asarray(activation(jnp.asarray(tau * z)), np.float64) ** 2, z)
  expected = 128 * sigma ** 2 * square * (tau ** 2 if mlp == 'swiglu' else 1)
  _, ffn = theory.branch_variances(model(mlp=mlp), found)
  np.testing.assert_allclose(ffn, expected, rtol=1e-3)


@pytest.mark.parametrize('changes', [{'scheme': 'post'}, {'scheme': 'lns_learned'}, {'scheme': 'lns_after_sum'},
                                     {'scheme': 'mix', 'mix_fraction': 0.5}, {'scheme': 'prores'}, {'norm': 'dyt'}])
def test_other_schemes_are_refused(changes):
  config = model(**changes)
  found = theory.constants(config, params(config), 8)
  with pytest.raises(UserError, match=changes.get('scheme', 'dyt')):
    theory.log_jacobian_bound(config, found, np.ones(3))
  with pytest.raises(UserError, match="such as scheme 'pre' or 'lns'"):
    theory.predicted_variance(config, found, 1.0)


@pytest.mark.parametrize('bad', [0.0, -1.0, np.nan])
def test_a_variance_that_is_not_above_0_is_refused(bad):
  config = model()
  found = theory.constants(config, params(config), 8)
  with pytest.raises(UserError, match='must be finite and above 0'):
    theory.log_jacobian_bound(config, found, [1.0, bad, 2.0])
  with pytest.raises(UserError, match='must be finite and above 0'):
    theory.predicted_variance(config, found, bad)
