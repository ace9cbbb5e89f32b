"""Code of the pages works as it is printed, docs/schemes.md knows every row, links lead to files."""

import itertools
import pathlib
import re

import pytest

from layers import test_block
from lns_jax.depth import measures
from lns_jax.layers import init, schemes

DOCS = pathlib.Path(__file__).parent.parent / 'docs'


def test_the_example_is_a_scheme_that_obeys_its_equation(monkeypatch):
  row, mine, by_hand = re.findall(r"```python\n( +'.*?)```", (DOCS / 'add_a_scheme.md').read_text(), re.S)
  monkeypatch.setitem(schemes.SCHEMES, 'lns_gpas', eval('{' + row + '}', vars(schemes))['lns_gpas'])
  monkeypatch.setitem(schemes.SCHEMES, 'mine', eval('{' + mine + '}', vars(schemes))['mine'])
  monkeypatch.setitem(test_block.HAND, 'lns_gpas', eval('{' + by_hand + '}', vars(test_block))['lns_gpas'])
  monkeypatch.setitem(test_block.HAND, 'mine', ('in', lambda l, L, p: {'b': L ** -0.5}))
  for scheme in ('lns_gpas', 'mine'):
    test_block.test_every_scheme_obeys_the_equation(scheme, 3)


@pytest.mark.parametrize('table', [schemes.SCHEMES, init.INITS])
def test_the_page_of_schemes_has_every_row(table):
  named = set(re.findall(r'`(\w+)`', ' '.join(re.findall(r'^\|([^|]*)\|', (DOCS / 'schemes.md').read_text(), re.M))))
  assert set(table) <= named


def test_the_page_of_theory_prints_what_it_shows(capsys):
  """Blocks of python run in turn, in one namespace; a block of text behind one is what it prints."""
  blocks = re.findall(r'^```(\w*)\n(.*?)^```', (DOCS / 'theory.md').read_text(), re.M | re.S)
  assert len(blocks) > 10
  namespace = {}
  for (kind, code), (behind, text) in itertools.pairwise([*blocks, ('', '')]):
    if kind == 'python':
      exec(compile(code, 'docs/theory.md', 'exec'), namespace)
      assert capsys.readouterr().out == (text if behind == 'text' else '')


PAGES = [DOCS.parent / 'README.md', *sorted(DOCS.glob('*.md'))]


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_every_relative_link_leads_to_a_file(page):
  links = re.findall(r'\]\(([^()\s]+)\)|(?:src|href)="([^"]+)"', page.read_text())
  files = {link.partition('#')[0] for pair in links for link in pair if link and not re.match(r'\w+:', link)}
  assert [f for f in sorted(files) if f and not (page.parent / f).exists()] == []


def test_the_page_of_depth_has_every_measure():
  named = set(re.findall(r'^\| `(\w+)`', (DOCS / 'depth.md').read_text(), re.M))
  assert named >= set(measures.LOSS) and 'task_drop' in (DOCS / 'depth.md').read_text()
