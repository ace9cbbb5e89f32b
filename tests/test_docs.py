"""Code of the pages works as it is printed, docs/schemes.md knows every row, links lead to files."""

import dataclasses
import itertools
import json
import pathlib
import re
import subprocess
import sys

import pytest

from layers import test_block
from lns_jax import config, presets, xla_flags
from lns_jax.aot import table
from lns_jax.depth import measures
from lns_jax.layers import init, schemes
from lns_jax.train import mfu

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


# Names without a hyphen in other people's commands.
GCLOUD = {'zone', 'location', 'recursive', 'scopes', 'worker', 'port', 'role', 'member', 'format'}


def test_every_flag_and_setting_on_the_page_of_tpus_exists():
  root, page = DOCS.parent, (DOCS / 'tpu.md').read_text()
  code = '\n'.join(p.read_text() for room in ('experiments', 'lns_jax') for p in (root / room).rglob('*.py'))
  options = ' '.join(re.findall(r"^parse '(.*?)' '(.*?)'", p.read_text(), re.M)[0][i] for i in (0, 1)
                     for p in (root / 'experiments/launch').glob('*.sh') if p.name != 'common.sh')
  flags = set(re.findall(r"DEFINE_\w+\(\s*'(\w+)'", code)) | set(options.split()) | {'config', 'help', 'dry_run'}
  flags |= {f.name for f in dataclasses.fields(config.DataConfig)}  # of prepare_data.py
  flags |= {flag for of_chip in xla_flags.FLAGS.values() for flag in of_chip}
  named = set(re.findall(r'--([a-z_]+)(?![a-z_.-])', page))
  assert sorted(f for f in named - GCLOUD if f not in flags and f.removeprefix('no') not in flags) == []
  known, settings = config.defaults(), re.findall(r'--config\.(\w+)\.(\w+)', page)
  assert len(settings) > 10 and [s for s in settings if s[1] not in known.get(s[0], ())] == []
  presets_named = set(re.findall(r'--config=(\w+)', page))
  assert presets_named and presets_named <= set(presets.config_names())
  for script in re.findall(r'experiments/[\w/]+\.(?:py|sh)', page):
    assert (root / script).is_file(), script


def test_the_table_of_tpus_has_every_entry_and_no_other():
  script = 'import json, tpu_table as t; print(json.dumps([t.command(*e) for e in t.entries()]))'
  wanted = subprocess.run([sys.executable, '-c', script], cwd=DOCS.parent / 'benchmarks', capture_output=True, check=True)
  lines = [json.loads(line) for line in (DOCS / 'tpu_table.jsonl').read_text().splitlines()]
  assert [line['command'] for line in lines] == json.loads(wanted.stdout)
  assert not any('error' in line for line in lines) and all(line['saving_bytes'] for line in lines)
  assert (DOCS / 'tpu_table.md').read_text() == table.page(lines)


def test_the_costs_on_the_page_of_tpus_follow_from_its_formula():
  rows, run = re.findall(r'^\| (?:`(\w+)`[^|]*)?\|([^|]*)\|([^|]*)\| (\d+) % \|(.*)\|$', (DOCS / 'tpu.md').read_text(), re.M), None
  assert len(rows) == 4
  for name, tokens, flops, percent, hours in rows:
    if name:
      c = presets.load_config(name)
      count = config.num_steps(c, 0) * c.train.batch_size * c.row_tokens
      run = count * mfu.flops_per_token(c.model, c.row_tokens)
      assert float(tokens) == pytest.approx(count, rel=5e-3) and float(flops) == pytest.approx(run, rel=5e-3)
    for kind, cell in zip(('TPU v5e', 'TPU v4', 'TPU v5p', 'TPU v6e'), hours.split('|'), strict=True):
      right = run / (mfu.PEAK_TFLOPS[kind] * 1e12 * int(percent) / 100) / 3600
      assert float(re.search(r'[\d.]+', cell)[0]) == pytest.approx(right, abs=0.051 if right < 20 else 0.51)


def test_the_page_of_depth_has_every_measure():
  named = set(re.findall(r'^\| `(\w+)`', (DOCS / 'depth.md').read_text(), re.M))
  assert named >= set(measures.LOSS) and 'task_drop' in (DOCS / 'depth.md').read_text()
