"""The report in a real browser: quiet, alone, and readable on a desk and on a telephone.

The first tests show that the checks see what they look for.
"""

import pytest
import report_cases
from browser import chromium

from lns_jax.depth import report

pytestmark = pytest.mark.skipif(chromium.BROWSER is None,
                                reason='needs chromium on the PATH: apt-get install chromium')

DESK, TELEPHONE = 1280, 390
OUTSIDE = 'http://127.0.0.1:9/outside.png'  # nothing listens on the discard port

# How far content reaches beyond the viewport, in CSS pixels.
OVERFLOW = 'document.documentElement.scrollWidth - document.documentElement.clientWidth'
# Font size of the smallest text in the pictures as the eye meets it, in CSS pixels, whatever its rotation.
SMALLEST = '''Math.min(...[...document.querySelectorAll("svg text")].map(
    t => parseFloat(getComputedStyle(t).fontSize) * Math.hypot(t.getScreenCTM().c, t.getScreenCTM().d)))'''
# Texts of pictures that leave their picture.
CUT = '''[...document.querySelectorAll("svg text")].filter(t => {
    const a = t.getBoundingClientRect(), b = t.ownerSVGElement.parentNode.getBoundingClientRect();
    return a.left < b.left || a.right > b.right || a.top < b.top || a.bottom > b.bottom}).map(t => t.textContent)'''


@pytest.fixture(scope='module')
def browser():
  with chromium.Chromium() as running:
    yield running


@pytest.fixture
def show(browser, tmp_path):
  def show(text: str, **kwargs) -> chromium.Page:
    path = tmp_path / 'page.html'
    path.write_text(text, encoding='utf-8')
    return browser.open(path, **kwargs)
  return show


def _page(inner: str) -> str:
  return f'<!doctype html><link rel="icon" href="data:,"><title>t</title>{inner}'


def test_an_empty_page_is_quiet(show):
  page = show(_page('<p>nothing'))
  assert (page.complaints, page.requests, page.value(OVERFLOW)) == ([], [], 0)


@pytest.mark.parametrize('script, words', [
    ('console.error("bad", 1)', 'bad 1'), ('console.warn("odd")', 'odd'), ('nowhere()', 'Uncaught')])
def test_console_errors_and_exceptions_are_heard(show, script, words):
  assert show(_page(f'<script>{script}</script>')).complaints == [words]


@pytest.mark.parametrize('inner', [
    f'<img src="{OUTSIDE}">', f'<style>body{{background:url({OUTSIDE})}}</style><p>x',
    f'<svg><image href="{OUTSIDE}" width="9" height="9"/></svg>',
    f'<script>fetch("{OUTSIDE}").catch(() => 0)</script>'])
def test_requests_are_seen(show, inner):
  assert show(_page(inner)).requests == [OUTSIDE]


def test_a_page_that_is_too_wide_is_noticed(show):
  page = show(_page('<meta name="viewport" content="width=device-width"><div style="width:700px">x</div>'),
              width=TELEPHONE)
  assert page.value(OVERFLOW) > 300


def test_small_text_is_noticed(show):
  page = show(_page('<svg viewBox="0 0 100 50" style="width:50px"><text style="font-size:20px" y="20">a</text>'
                    '<text style="font-size:8px" transform="rotate(-90 9 9)">b</text></svg>'))
  assert page.value(SMALLEST) == pytest.approx(4, abs=0.1)


def test_cut_text_is_noticed(show):
  page = show(_page('<figure style="width:60px"><svg viewBox="0 0 100 50"><text y="20">a</text>'
                    '<text x="90" y="20">far too long</text></svg></figure>'))
  assert page.value(CUT) == ['far too long']


@pytest.mark.parametrize('case', ['twins', 'many names', 'diverged', 'deep', 'no statistics'])
@pytest.mark.parametrize('width, scheme', [(DESK, 'light'), (TELEPHONE, 'light'), (TELEPHONE, 'dark')])
def test_the_report_is_quiet_alone_and_fits(show, rendered, case, width, scheme):
  page = show(rendered[case], width=width, scheme=scheme)
  assert page.complaints == [] and page.requests == []
  assert page.value(OVERFLOW) == 0
  assert page.value(SMALLEST) >= 9
  assert page.value(CUT) == []
  assert page.value('document.querySelectorAll("figure svg").length') > 4


@pytest.fixture(scope='module')
def rendered():
  cases = {'twins': {'L': 16}, 'diverged': {'diverged': ('pre', 'lns')}, 'no statistics': {'stats': False},
           'deep': {'names': ('pre', 'lns'), 'L': 96},
           'many names': {'names': ('pre', '<b>$a_b$</b> & a name of more than forty letters', '_hidden', 'x' * 60)}}
  return {name: report.render(*report_cases.make(**kwargs), 'runs/quickstart') for name, kwargs in cases.items()}


def test_a_wide_table_scrolls_inside_its_box_and_the_row_names_stay(show, rendered):
  page = show(rendered['many names'], width=TELEPHONE)
  assert page.value('document.querySelector(".scroll").scrollWidth > document.querySelector(".scroll").clientWidth')
  stays = page.value('''(() => { const box = document.querySelector(".scroll"), cell = box.querySelector("tbody th");
      box.scrollLeft = 200; return cell.getBoundingClientRect().left - box.getBoundingClientRect().left; })()''')
  assert abs(stays) < 2


def test_the_table_of_twins_fits_a_telephone(show, rendered):
  page = show(rendered['twins'], width=TELEPHONE)
  assert page.value('document.querySelector(".scroll").scrollWidth <= document.querySelector(".scroll").clientWidth')


def test_colours_follow_the_readers_preference(show, rendered):
  def luminance(scheme):
    page = show(rendered['twins'], scheme=scheme)
    of = lambda what: sum(map(int, page.value(f'getComputedStyle(document.body).{what}')[4:-1].split(',')))
    return of('backgroundColor'), of('color')
  (page_light, ink_light), (page_dark, ink_dark) = luminance('light'), luminance('dark')
  assert page_light > ink_light and page_dark < ink_dark
