"""The report holds for any models, stands alone, and says what its numbers say."""

import functools
import html
import re

import numpy as np
import pytest
import report_cases

from lns_jax.depth import plots_maps, report, sections

NASTY = '<b>$a_b$ & "q"</b>'
MANY = ('pre', 'post', 'lns', 'branch_lns', 'lns_before', 'lns_after_sum', 'res_norm', 'sandwich', 'peri', 'deepnorm',
        'mix', '_last')


@functools.cache
def _render(*args, **kwargs):
  return report.render(*report_cases.make(*args, **kwargs), 'runs/it')


def _titles(page):
  return re.findall(r'<h2>(.*?)</h2>', page)


ALL = ['Loss', 'Variance of the residual stream', 'Angular distance', 'Removal of single layers',
       'What each layer turns', 'Residual branches', 'What was run', 'How to go on']


@pytest.mark.parametrize('names, L, pictures', [(('pre', 'lns'), 4, 15), (('only',), 2, 10), (('a', 'b', 'c'), 5, 19)])
def test_every_model_has_its_pictures(names, L, pictures):
  page = _render(names, L)
  assert _titles(page) == ALL
  # Loss, variance, two of influence, two of branches; the difference of several; and four a model.
  assert page.count('<svg') == page.count('<figure') == pictures


@pytest.mark.slow
def test_a_page_of_many_deep_models_stays_small():
  page = _render(MANY, 96)
  assert len(page.encode()) < 1_500_000
  assert all(f'>{name}</th>' in page for name in MANY)


def test_a_diverged_model_is_named_with_its_reason_and_keeps_its_curve():
  page = _render(('pre', 'post'), diverged=('post',))
  assert 'post diverged, so it has no final loss and no measures: the loss became nan at step 37' in page
  assert '<td>diverged</td>' in page
  assert 'Output variance of each layer of post over training' in page
  assert 'Heat map of the angular distances between the layers of post' not in page


def test_when_all_diverge_what_was_logged_is_still_shown():
  page = _render(diverged=('pre', 'lns'))
  assert 'No model reached the end of its training.' in page
  assert _titles(page) == ['Loss', 'Variance of the residual stream', 'Residual branches', *ALL[-2:]]


def test_variance_by_layer_is_drawn_at_a_few_updates_of_the_run():
  page = _render()  # logged at updates 1, 11, ..., 191: a tenth, three and six tenths of the way, and the last
  assert sorted(set(re.findall(r'>update ([0-9]+)</text>', page)), key=int) == ['21', '61', '111', '191']
  assert 'Output variance by layer of lns at some updates' in page


def test_updates_without_a_finite_value_are_not_drawn():
  summary, histories = report_cases.make(('pre',))
  rows = [r for r in histories['pre'] if 'variance' in r]
  for record in rows[1:]:
    record['variance'] = [None] * 5
  page = report.render(summary, histories, 'runs/it')
  assert set(re.findall(r'>update ([0-9]+)</text>', page)) == {'1'}
  rows[0]['variance'] = [None] * 5
  assert '>update ' not in report.render(summary, histories, 'runs/it')


def test_stretched_angles_are_named_where_they_are_drawn():
  models = report_cases.make()[0]['schemes']
  raw, stretched = (sections.angular(models, angles) for angles in ('raw', 'percentile'))
  for section, words in ((raw, 'Values are raw'), (stretched, '1st and 99th percentile')):
    assert words in section.how and section.found == raw.found
  for section, label, top in ((raw, 'angular distance', None), (stretched, 'angle, stretched within its row', 1.0)):
    image_axes, bar_axes = section.pictures[0].figure.axes
    assert bar_axes.get_ylabel() == label and (top is None or image_axes.images[0].get_clim() == (0, top))
  assert stretched.pictures[0].figure.axes[0].get_title('left') == 'pre, rows stretched'
  np.testing.assert_array_equal(stretched.pictures[1].figure.axes[0].images[0].get_array().filled(np.nan),
                                plots_maps.by_row_percentile(models['lns']['angular']))


def test_without_layer_statistics_the_report_says_so():
  page = _render(stats=False)
  assert 'No variance was logged during training (train.layer_stats_every is 0, or' in page
  assert _titles(page) == [t for t in ALL if t != 'Residual branches']


def test_the_opening_names_the_lower_loss_and_claims_no_more():
  page = _render()
  assert 'lns ended with the lower validation loss, 4.2500 nats per token, 0.2500 (5.56%) below pre (4.5000)' in page
  assert 'this is one seed' in page and 'was not tuned for each of them' in page
  assert '96 rows drawn from the validation split, 12,288 tokens' in page


def test_names_cannot_become_markup():
  page = _render(('pre', NASTY))
  assert '<b>' not in page and f'>{html.escape(NASTY)}</th>' in page


def test_not_a_number_is_shown_as_nothing():
  summary, histories = report_cases.make()
  summary['schemes']['pre'] |= {'val_loss': float('nan'), 'tokens_per_second': float('inf')}
  page = report.render(summary, histories, 'runs/it')
  assert not re.search(r'>[^<]*\b(nan|inf)\b', page)


def test_nothing_in_the_page_points_outside():
  page = _render()
  links = re.findall(r'(?:href|src|srcset|action|data)="([^"]*)"', page) + re.findall(r'url\(([^)]*)\)', page)
  assert links and all(link.startswith(('#', 'data:')) for link in links)
  assert '<script' not in page and '@import' not in page


def test_every_picture_is_described_and_no_id_repeats():
  page = _render()
  assert len(re.findall(r'<svg[^>]*role="img" aria-label="[^"]+"', page)) == page.count('<svg')
  ids = re.findall(r'\bid="([^"]+)"', page)
  assert len(ids) == len(set(ids))


def test_commands_name_the_run_folders_and_quote_them(tmp_path):
  folder = tmp_path / 'my runs'
  folder.mkdir()
  report.write(folder / 'report.html', *report_cases.make())
  page = html.unescape((folder / 'report.html').read_text())
  assert f"--workdir='{folder}/lns'" in page and f"compare.py '{folder}/pre' '{folder}/lns'" in page


def test_a_report_that_fails_leaves_the_old_one_whole(tmp_path):
  path = tmp_path / 'report.html'
  report.write(path, *report_cases.make())
  before = path.read_text()
  summary, histories = report_cases.make()
  del summary['config']
  with pytest.raises(KeyError):
    report.write(path, summary, histories)
  assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ['report.html']
