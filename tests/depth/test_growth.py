"""Laws of growth: known laws come back, and none is named where several could be."""

import numpy as np
import pytest
from scipy import optimize

from lns_jax.depth.growth import growth
from lns_jax.errors import UserError

l = np.arange(25.0)
KNOWN = {'linear': (2 + 3 * l, {'a': 2, 'b': 3}), 'power': (2 * l ** 1.5, {'a': 2, 'p': 1.5}),
         'exponential': (2 * np.exp(0.3 * l), {'a': 2, 'r': 0.3})}


@pytest.mark.parametrize('law', KNOWN)
def test_a_law_comes_back_with_its_numbers(law):
  """Also where the embedding, which no layer made, is far from it."""
  v, numbers = KNOWN[law]
  found = growth(np.concatenate([[1e3], v[1:]]))
  assert found.law == law == next(iter(found.laws))
  assert {k: e.value for k, e in found.laws[law].parameters.items()} == pytest.approx(numbers, rel=1e-6)
  np.testing.assert_allclose(found.laws[law].curve, v[1:], rtol=1e-6)
  assert found.laws[law].error.value < 1e-6 and found.laws[law].behind.value == 0


def test_the_straight_line_is_the_best_on_the_logarithm():
  """Against a general optimizer; a falling line, and one that starts near 0."""
  x = np.arange(1, 13.0)
  noise = np.exp(0.1 * np.random.default_rng(0).normal(size=12))
  for v in (20 - x, x - 0.98, 5 + x ** 2):
    y = np.log(v * noise)
    best = optimize.least_squares(lambda q: np.log(np.maximum(q[0] + q[1] * x, 1e-12)) - y, np.polyfit(x, v, 1)[::-1],
                                  x_scale='jac', xtol=1e-14, ftol=1e-14)
    law = growth(np.concatenate([[1], v * noise])).laws['linear']
    assert law.error.value <= np.sqrt(2 * best.cost / 12) * (1 + 1e-6)
    predicted = law.parameters['a'].value + law.parameters['b'].value * x
    np.testing.assert_allclose(predicted, law.curve, rtol=1e-6)
    assert np.sqrt(np.mean((np.log(predicted) - y) ** 2)) == pytest.approx(law.error.value)


def test_the_unit_of_the_variance_does_not_matter():
  v = 1 + l + np.sin(l)
  one, other = growth(v), growth(1e4 * v)
  for name in one.laws:
    assert other.laws[name].behind.value == pytest.approx(one.laws[name].behind.value, abs=1e-6)
    assert other.laws[name].error.value == pytest.approx(one.laws[name].error.value, rel=1e-6)


@pytest.mark.parametrize('v', [np.ones(13), 1 + 1e-3 * np.sin(np.arange(13) * 1e3), 1 + np.arange(13) % 2.0])
def test_no_law_is_named_where_the_variance_does_not_grow(v):
  found = growth(v)
  assert found.law is None and 'do not tell apart' in found.sentence()


def streams(law, L, trials, rng):
  """Streams whose layers add what the law says, give or take a fifth."""
  noise = np.exp(0.2 * rng.normal(size=(trials, L)))
  at = np.arange(L + 1.0)
  if law == 'exponential':
    return np.exp(np.cumsum(np.concatenate([np.zeros((trials, 1)), 0.15 * noise], axis=1), axis=1))
  start, power = (5.0, at) if law == 'linear' else (0.1, at ** 2)
  return start + np.cumsum(np.concatenate([np.zeros((trials, 1)), np.diff(power) * noise], axis=1), axis=1)


@pytest.mark.parametrize('L', [8, 24])
@pytest.mark.parametrize('law', KNOWN)
def test_noisy_streams_are_given_the_wrong_law_at_most_once_in_twenty(law, L):
  named = [growth(v).law for v in streams(law, L, 60, np.random.default_rng(L))]
  assert sum(n not in (law, None) for n in named) <= 3
  if L == 24:
    assert sum(n == law for n in named) >= 45


def test_neighbours_that_miss_a_law_together_count_for_less():
  """Errors of 5 % around 5 + l: from layer to layer they leave the line clearly best, in slow waves they do not."""
  fast, slow = np.where(l % 2, 1, -1), np.sqrt(2) * np.sin(4 * np.pi * l / 25)
  found = growth((5 + l) * np.exp(0.05 * fast)), growth((5 + l) * np.exp(0.05 * slow))
  assert [next(iter(g.laws)) for g in found] == ['linear', 'linear'] and [g.law for g in found] == ['linear', None]
  assert growth(np.exp(0.1 * l + 0.02 * slow)).law == 'exponential'  # a line is off by ten times as much


def test_intervals_are_those_of_the_replicates():
  rng = np.random.default_rng(0)
  p = 1.5 + 0.1 * rng.normal(size=501)
  found = growth(2 * np.maximum(l, 0.5) ** p[:, None], tokens=7).laws['power'].parameters['p']
  assert (found.value, found.tokens) == (pytest.approx(p[0]), 7)
  assert (found.low, found.high) == pytest.approx(tuple(np.quantile(p[1:], [0.025, 0.975])))


def test_a_law_that_some_samples_do_not_favour_is_not_named():
  """The sample is an exact power; one in ten of its replicates is an exact line."""
  power, line = 2 * np.maximum(l, 0.5) ** 1.5, 2 + 3 * l
  assert growth(np.stack([power] * 501)).law == 'power'
  mixed = growth(np.stack([power] * 451 + [line] * 50))
  assert mixed.law is None and not mixed.laws['linear'].ruled_out and mixed.laws['exponential'].ruled_out


def test_the_sentence_has_the_law_and_what_is_ruled_out():
  said = growth(KNOWN['linear'][0]).sentence()
  assert said.startswith('The variance after layer l is 2 + 3 l (linear, off by less than 0.1%); ruled out: power (off')
  assert ' and exponential (off by ' in said
  assert ' 30 - 1 l (linear, ' in growth(30 - l).sentence()
  each = np.stack([2 * np.maximum(l, 0.5) ** p for p in (1.5, 1.4, 1.6)])
  assert '2 l^1.5 (power, p from 1.4' in growth(each).sentence()


@pytest.mark.parametrize('v, message', [
    ([1, 2, 3, 4], 'at least 4 layers, but there are 3'), ([1, 2, 0, 4, 5], 'after layer 2 is 0'),
    ([1, 2, 3, np.nan, 5], 'after layer 3 is nan')])
def test_what_no_law_can_be_fitted_to(v, message):
  with pytest.raises(UserError, match=message):
    growth(v)
