"""Numbers and words of the table of schemes, by hand, and the page and picture of them."""

import math
import pathlib

import pytest

from lns_jax import files
from lns_jax.depth import plots
from lns_jax.reproduce import plan, schemes, schemes_page, schemes_plot, schemes_summary
from lns_jax.reproduce.plan import Spec

PRE = [4.0, 4.1, 4.3]


def record(spec: Spec, loss: float | None) -> dict:
  return {'arm': spec.arm, 'rate': spec.rate, 'seed': spec.seed, 'diverged': loss is None, 'loss': loss, 'params': 7,
          'variance': [1.0, 2.0 + spec.seed], 'commit': 'abc', 'cores': 1, 'corpus_hash': 'f' * 64, 'tokens': 1000,
          'versions': {'jax': '1'}, 'hardware': {'cpu': 'a cpu', 'backend': 'cpu', 'python': '3'}}


def known(**arms) -> dict:
  """{arm: [loss of seed 0, 1, 2 at 8e-3]}: at half and twice of the rate the loss is 0.5 more."""
  found = {}
  for arm, values in arms.items():
    found |= {s: record(s, v) for s, v in ((Spec(arm, 8e-3, i), v) for i, v in enumerate(values))}
    worse = None if values[0] is None else values[0] + 0.5
    found |= {s: record(s, worse) for s in (Spec(arm, r, 0) for r in (4e-3, 1.6e-2))}
  return found


def summary(found: dict, speeds=(), chosen=()) -> dict:
  return files.finite(schemes_summary.summary(
      'tiny', schemes.base('tiny', {}), plan.arms(), list(chosen), found, schemes.losses(found), dict(speeds),
      'make it'))


def row(found: dict, arm: str) -> dict:
  return next(r for r in summary(found)['rows'] if r['arm'] == arm)


def test_differences_are_paired_by_seed_and_have_students_interval():
  # Differences -0.1, -0.2, -0.3: mean -0.2, sd 0.1; t(2, 0.975) = 4.3027, half = 0.24842.
  of_lns = row(known(pre=PRE, lns=[3.9, 3.9, 4.0]), 'lns')
  difference = of_lns['tuned']['difference']
  assert difference['pairs'] == 3 and difference['mean_difference'] == pytest.approx(-0.2)
  assert difference['interval'] == pytest.approx([-0.44842, 0.04842], abs=1e-4)
  assert of_lns['tuned']['verdict'] == 'no difference shown' and of_lns['tuned']['mean'] == pytest.approx(11.8 / 3)
  assert of_lns['last_variance'] == 3.0 and of_lns['best_rate'] == 8e-3


@pytest.mark.parametrize('losses, word', [
    ([3.90, 4.01, 4.19], 'better'), ([4.10, 4.19, 4.41], 'worse'), ([3.9, 4.2, 4.3], 'no difference shown'),
    ([3.9], 'too few pairs'), ([3.9, None, 4.2], '1 of 3 diverged'), ([None, None, None], 'diverged')])
def test_the_word_is_better_or_worse_only_where_the_interval_excludes_0(losses, word):
  assert row(known(pre=PRE, lns=losses), 'lns')['tuned']['verdict'] == word


def test_an_interval_that_touches_0_shows_no_difference():
  assert schemes_summary.verdict({'interval': [-0.2, 0.0]}) == 'no difference shown'
  assert schemes_summary.verdict({'interval': [0.0, 0.2]}) == 'no difference shown'


def test_a_diverged_seed_is_counted_and_has_no_mean():
  cell = row(known(pre=PRE, lns=[3.9, None, 4.2]), 'lns')['tuned']
  assert cell['mean'] is None and cell['diverged'] == 1 and cell['difference'] is None
  assert [x['loss'] for x in cell['losses']] == [3.9, None, 4.2]


def test_each_arm_is_compared_at_its_own_best_rate_and_at_the_common_one():
  found = known(pre=PRE, lns=[4.0, 4.1, 4.3])
  for seed, loss in enumerate((3.8, 3.9, 4.1)):  # lns is better at twice the rate, and worse again beyond
    spec = Spec('lns', 1.6e-2, seed)
    found[spec] = record(spec, loss)
  found[Spec('lns', 3.2e-2, 0)] = record(Spec('lns', 3.2e-2, 0), 5.0)
  of_lns = row(found, 'lns')
  assert of_lns['best_rate'] == 1.6e-2 and not of_lns['best_rate_at_an_end']
  assert of_lns['common']['difference']['mean_difference'] == 0
  assert of_lns['tuned']['difference']['mean_difference'] == pytest.approx(-0.2)


def test_pre_is_the_baseline_and_what_is_missing_is_counted():
  found = known(pre=PRE)
  whole = summary(found)
  assert [r['arm'] for r in whole['rows']] == ['pre'] and row(found, 'pre')['tuned']['verdict'] == 'baseline'
  assert whole['missing_runs'] == 2 and whole['commits'] == {'abc': 5} and len(whole['runs']) == 5
  assert 'About 2 runs are still to come' in schemes_page.page(whole)
  # An arm that was asked for counts before its first run: its grid, and two more seeds at its best rate.
  assert summary(found, chosen=['pre', 'post'])['missing_runs'] == 2 + 3 + 2 + 2


def test_an_unfinished_table_has_a_page_and_a_picture(tmp_path):
  found = {s: record(s, 4.0) for s in (Spec('pre', 8e-3, 0), Spec('lns', 4e-3, 0))}
  for part in ({}, found, known(pre=PRE, lns=[3.9, 4.0, 4.1])):
    assert schemes_page.page(summary(part)).startswith('# Schemes')
    assert not list(tmp_path.iterdir())  # no empty frame
    schemes_plot.save(tmp_path / 'schemes.png', summary(part))
  assert [p.name for p in tmp_path.iterdir()] == ['schemes.png']


def test_the_page_says_what_the_numbers_say():
  speed = {'ratio': 0.98, 'low': 0.9, 'high': 1.05, 'steps': 27, 'tokens_per_second': [9000.0, 8800.0], 'cores': 2,
           'commit': 'd' * 40}
  found = known(pre=PRE, lns=[3.9, 3.9, 4.0], post=[None, None, None], mix=[3.90, 4.01, 4.19])
  lines = schemes_page.docs_table(summary(found, {'pre': speed, 'lns': speed})).splitlines()
  assert [line.split('`')[1] for line in lines[2:]] == ['lns', 'mix', 'pre', 'post']  # by loss, the diverged last
  lns, mix, post = lines[2], lines[3], lines[5]
  assert '3.9333 (3) | -0.2000 [-0.4484, +0.0484] | no difference shown' in lns and '0.980 [0.900, 1.050]' in lns
  assert '| better |' in mix and '3 of 3 diverged' in post and '| diverged |' in post
  assert {line.count('|') for line in lines} == {len(schemes_page.HEAD) + 1}
  notes = schemes_page.notes(summary(found, {'pre': speed}))
  assert '9,000 tokens/s on 2 processors, commit dddddddddddd.' in notes and 'Command: `make it`' in notes


def test_the_notes_say_what_a_row_is_that_the_shared_settings_do_not_say():
  losses = {arm: PRE for arm in ('pre', 'prores', 'keel', 'completep', 'mix', 'layerscale', 'lns_attn_only')}
  base = schemes.base('cpu', {})
  notes = schemes_page.notes(files.finite(schemes_summary.summary(
      'cpu', base, plan.arms(), [], known(**losses), schemes.losses(known(**losses)), {}, '')))
  for words in ('`prores_steps` = 2 (prores: T, ', 'is after T l; by default 1000)',
                '`keel_alpha` = 0.0 (keel: ', 'open; 0: L)',
                '`base_depth` = 2 (completep: L0', '`mix_fraction` = 0.25 (mix: ',
                '`layerscale_init` = 0.0 (layerscale: Start; 0: 0.1, 1e-5, 1e-6 by depth',
                '`lns_attn_only` is `lns` with p_mlp = 0.0'):
    assert words in notes
  assert 'alpha_init' not in notes  # lns_learned is no row here
  assert 'single scheme' not in schemes_page.notes(summary(known(pre=PRE)))


def test_a_scheme_that_diverges_with_one_seed_of_three_is_neither_better_nor_worse():
  found = known(pre=PRE, lns=[3.9, None, 4.0], mix=[3.90, 4.01, 4.19])
  line = next(x for x in schemes_page.docs_table(summary(found)).splitlines() if '`lns`' in x)
  assert '| 1 of 3 diverged |  | 1 of 3 diverged |' in line  # the loss, no difference, the verdict
  axes = schemes_plot.figure(summary(found)).axes[0]
  assert [t.get_text() for t in axes.get_yticklabels()] == ['mix', 'lns']
  assert axes.texts[0].get_text().strip() == '1 of 3 diverged'
  of = schemes.Table('tiny', schemes.base('tiny', {}), plan.arms(), ['pre'], pathlib.Path('t'), [[]])
  line = schemes.brief(of, summary(found))
  assert line['diverged'] == ['lns'] and line['better'] == ['mix'] and line['worse'] == []


def test_the_picture_is_sorted_and_names_what_diverged():
  found = known(pre=PRE, lns=[4.1, 4.2, 4.4], post=[None, None, None], mix=[3.90, 4.01, 4.19])
  axes = schemes_plot.figure(summary(found)).axes[0]
  assert [t.get_text() for t in axes.get_yticklabels()] == ['mix', 'lns', 'post']
  assert 'diverged' in axes.texts[0].get_text()
  (mix,) = [line for line in axes.lines if line.get_color() == plots.COLORS[2] and line.get_marker() == 'o']
  assert mix.get_xdata()[0] == pytest.approx(-0.1)


def test_a_scheme_that_is_far_off_bends_the_axis():
  near, far = (schemes_plot.figure(summary(known(pre=PRE, lns=[p + by + 0.01 * i for i, p in enumerate(PRE)])))
               for by in (0.02, 2.0))
  assert near.axes[0].get_xscale() == 'linear' and far.axes[0].get_xscale() == 'symlog'


def test_a_rate_at_the_end_of_all_that_were_tried_is_marked():
  found = {s: record(s, 4 - i) for i, s in enumerate(Spec('pre', 8e-3 * 2.0**k, 0) for k in (-1, 0, 1, 2, 3))}
  assert '| > 0.064 |' in schemes_page.docs_table(summary(found))
  found = {s: record(s, 4 + i) for i, s in enumerate(Spec('pre', 8e-3 * 2.0**k, 0) for k in (-3, -2, -1, 0, 1))}
  assert '| < 0.001 |' in schemes_page.docs_table(summary(found))


def test_losses_of_diverged_runs_are_infinite():
  found = known(pre=PRE, post=[None])
  assert schemes.losses(found)[Spec('post', 8e-3, 0)] == math.inf
