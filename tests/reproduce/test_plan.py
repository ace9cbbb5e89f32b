"""The plan of the table of schemes, by hand."""

import math

from lns_jax.layers import schemes
from lns_jax.reproduce import plan
from lns_jax.reproduce.plan import Spec


def losses(arm: str, by_rate: dict[float, float], seed: int = 0) -> dict:
  return {Spec(arm, rate, seed): loss for rate, loss in by_rate.items()}


def rates(specs) -> list[float]:
  return [s.rate for s in specs]


def test_every_scheme_is_an_arm_and_the_most_wanted_are_first():
  arms = list(plan.arms())
  assert arms[:2] == ['pre', 'lns'] and set(schemes.SCHEMES) <= set(arms)
  rest = [a for a in arms[2:] if a in schemes.SCHEMES]
  assert rest == [s for s in schemes.SCHEMES if s not in ('pre', 'lns')]


def test_all_arms_run_at_three_rates_before_any_second_seed():
  wanted = plan.wanted(['pre', 'lns', 'post'], 8e-3, {})
  assert wanted[:9] == [Spec(a, r, 0) for a in ('pre', 'lns', 'post') for r in (4e-3, 8e-3, 1.6e-2)]
  # Their best rates are open: of the seeds, those at the common rate are known.
  assert wanted[9:12] == [Spec(a, 8e-3, 1) for a in ('pre', 'lns', 'post')]
  assert wanted[15:] == [Spec(a, 8e-3, s) for s in (3, 4) for a in ('pre', 'lns')]
  assert plan.expected(['pre', 'lns', 'post'], 8e-3, {}) == len(wanted) + 4 + 4 + 2


def test_a_best_rate_inside_ends_the_search():
  known = losses('post', {4e-3: 4.1, 8e-3: 4.0, 1.6e-2: 4.2})
  assert len(plan.grid('post', 8e-3, known)) == 3 and plan.best_rate('post', 8e-3, known) == 8e-3
  assert not plan.at_the_end('post', 8e-3, known)
  more = plan.wanted(['post'], 8e-3, known)[3:]
  assert more == [Spec('post', 8e-3, 1), Spec('post', 8e-3, 2)]  # the best is the common one: one run serves both


def test_a_best_rate_at_an_end_goes_on_until_it_is_inside():
  known = losses('post', {4e-3: 4.3, 8e-3: 4.2, 1.6e-2: 4.1})
  assert rates(plan.grid('post', 8e-3, known))[-1] == 3.2e-2 and plan.best_rate('post', 8e-3, known) is None
  known |= losses('post', {3.2e-2: 4.15})
  assert rates(plan.grid('post', 8e-3, known))[-1] == 3.2e-2 and plan.best_rate('post', 8e-3, known) == 1.6e-2
  more = plan.wanted(['post'], 8e-3, known)[4:]
  assert more == [Spec('post', r, s) for r in (1.6e-2, 8e-3) for s in (1, 2)]


def test_the_search_ends_after_two_more_rates_and_says_that_the_best_is_at_the_end():
  falling = {r: 4 + r for r in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)}
  known = losses('post', {r: falling[r] for r in (4e-3, 8e-3, 1.6e-2)})
  assert rates(plan.grid('post', 8e-3, known))[0] == 2e-3
  known = losses('post', falling)
  assert rates(plan.grid('post', 8e-3, known)) == list(falling) and plan.best_rate('post', 8e-3, known) == 1e-3
  assert plan.at_the_end('post', 8e-3, known)


def test_a_diverged_rate_is_the_worst_and_an_arm_that_always_diverges_is_tried_lower():
  known = losses('post', {4e-3: 9.0, 8e-3: math.inf, 1.6e-2: math.inf})
  assert rates(plan.grid('post', 8e-3, known))[0] == 2e-3
  every = losses('post', dict.fromkeys((1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), math.inf))
  assert len(plan.grid('post', 8e-3, every)) == 5 and plan.best_rate('post', 8e-3, every) is None
  assert plan.wanted(['post'], 8e-3, every)[5:] == [Spec('post', 8e-3, 1), Spec('post', 8e-3, 2)]


def test_rates_and_names_are_the_plain_numbers():
  assert [s.name for s in plan.grid('pre', 8e-3, {})] == ['pre_lr0.004_seed0', 'pre_lr0.008_seed0', 'pre_lr0.016_seed0']
  assert rates(plan.grid('pre', 1e-3, {})) == [5e-4, 1e-3, 2e-3]


def test_pre_and_lns_get_five_seeds_and_others_three():
  known = {}
  for arm in ('pre', 'lns', 'mix'):
    known |= losses(arm, {4e-3: 4.1, 8e-3: 4.0, 1.6e-2: 4.2})
  count = {arm: sum(s.arm == arm and s.rate == 8e-3 for s in plan.wanted(list(plan.arms()), 8e-3, known))
           for arm in ('pre', 'lns', 'mix')}
  assert count == {'pre': 5, 'lns': 5, 'mix': 3}
