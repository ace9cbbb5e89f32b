"""report.html: models compared by loss and by what their depth does, in one file that needs nothing else."""

import json
import pathlib
import shlex
from collections.abc import Mapping

import numpy as np

from lns_jax import files
from lns_jax.depth import findings, page, sections
from lns_jax.depth.findings import number
from lns_jax.depth.plots import floats


def write(path: pathlib.Path, summary: dict, histories: Mapping[str, list[dict]]):
  """Writes the report whole or not at all.

  Args:
    path: of the HTML file; its folder holds the runs, which the commands in the report name.
    summary: as `lns_jax.twins.compare` returns it; any number of schemes, with any names. Measures that a model
      lacks are left out.
    histories: name -> records of its metrics.jsonl.
  """
  path = pathlib.Path(path)
  files.write_text(path, render(summary, histories, path.parent))


def render(summary: dict, histories: Mapping[str, list[dict]], workdir) -> str:
  """The report as text, see `write`."""
  summary = json.loads(json.dumps(summary, default=float), parse_constant=lambda _: None)  # as JSON has no NaN
  schemes = summary['schemes']
  title = findings.listed(schemes) if len(schemes) <= 4 else f'{len(schemes)} norm placements'
  title += ' compared' if len(schemes) > 1 else ', trained and measured'
  parts = (sections.loss(schemes, histories), sections.variance(schemes, histories), sections.angular(schemes),
           sections.removal(schemes), sections.influence(schemes), sections.branches(schemes, histories))
  body = [f'<h1>{page.text(title)}</h1>', *_opening(summary), *(part.html() for part in parts if part),
          _footer(summary, workdir)]
  return page.page(f'lns_jax: {title}', ''.join(body))


def _opening(summary: dict) -> list[str]:
  schemes, config = summary['schemes'], summary['config']
  measured = []
  if findings.with_measure(schemes, 'layer_drop'):
    measured += findings.removal(schemes)[:1]
  if findings.with_measure(schemes, 'variance'):
    measured.append(findings.last_variance(schemes))
  fair = ''
  if len(schemes) > 1:
    fair = ('The models differ in their norm placement alone. All were trained on the same rows in the same order, '
            f'with seed {config["train"]["seed"]} and a peak learning rate of {config["optimizer"]["lr"]:g}, which '
            'was not tuned for each of them. ')
  fair += (f'Depth measures are taken on {summary["sample"]}; intervals are 95% over its sequences, and do not cover '
           'the spread between seeds.')
  return [page.paragraph(findings.losses(schemes), 'lead'), page.facts(findings.divergences(schemes) + measured),
          page.paragraph(fair, 'how'), _table(schemes)]


def _last_interval(found: dict) -> str:
  band = sections.band_of(found, 'variance')
  return f'{number(band.low[-1])}–{number(band.high[-1])}' if band.low is not None else '–'


def _table(schemes: Mapping[str, dict]) -> str:
  """Models in columns, numbers in rows."""
  def plain(key, form):
    return lambda s: '–' if s.get(key) is None else format(s[key], form)
  def measured(key, say):
    return lambda s: '–' if s.get(key) is None else say(s)
  rows = {
      'validation loss, nats per token': lambda s: 'diverged' if s.get('diverged') else plain('val_loss', '.4f')(s),
      'perplexity': plain('val_perplexity', '.2f'),
      'bits per byte': plain('val_bits_per_byte', '.4f'),
      'evaluated tokens': plain('val_tokens', ',d'),
      'training tokens': plain('tokens', ',d'),
      'parameters': plain('params', ',d'),
      'training tokens per second, median': plain('tokens_per_second', ',.0f'),
      'loss on the depth sample': plain('baseline', '.4f'),
      f'layers removable at < {findings.SMALL:g}% rise': measured(
          'layer_drop', lambda s: f'{findings.removable(s)} of {s["layers"]}'),
      'variance of the last layer': measured('variance', lambda s: number(s['variance'][-1])),
      'its 95% interval': measured('variance', _last_interval),
      'mean angle across one layer': measured('angular', lambda s: number(np.nanmean(sections.across_one(s['angular'])))),
      'mean block influence': measured('block_influence', lambda s: number(np.nanmean(floats(s['block_influence'])))),
  }
  cells = [(label, *map(say, schemes.values())) for label, say in rows.items()]
  return page.table('All numbers', ('', *schemes), cells)


def _footer(summary: dict, workdir) -> str:
  """What was run, on what, for how long, and how to go on."""
  corpus, hardware, config = summary['corpus'], summary['hardware'], summary['config']
  rows = corpus['rows']
  model, train = config['model'], config['train']
  shape = (f'{model["num_layers"]} layers, width {model["d_model"]}, {model["num_heads"]} heads, MLP {model["d_ff"]}, '
           f'vocabulary {model["vocab_size"]:,}; {train["batch_size"]} rows of {config["data"]["seq_len"]} tokens an '
           f'update; initialisation {model["init"]}; {config["optimizer"]["name"]}, {config["optimizer"]["schedule"]}')
  facts = [f'Model and training: {shape}.',
           f'Corpus: {config["data"]["source"]}, {rows["train"]:,} rows for training and {rows["validation"]:,} for '
           f'validation, hash {corpus["hash"]}. Numbers from corpora with other hashes are not comparable.',
           f'Sample of the depth measures: {summary["sample"]}.',
           f'Hardware: {hardware["devices"]} x {hardware["device"]} ({hardware["backend"]}), {hardware["cpu_cores"]} '
           f'cores, {hardware["cpu"]}, Python {hardware["python"]}.']
  total = summary['seconds']
  phases = [(name, f'{s:,.1f}', f'{s / total:.0%}') for name, s in summary['phases'].items()]
  folders = [shlex.quote(str(pathlib.Path(workdir) / name)) for name in summary['schemes']]
  scheme = shlex.quote(list(summary['schemes'])[-1])
  commands = (f'# loss of a whole split\npython experiments/evaluate.py --workdir={folders[-1]}\n'
              f'# runs side by side\npython experiments/compare.py {" ".join(folders)}\n'
              '# the same model for longer, in a folder of its own\npython experiments/pretrain.py --config=quickstart '
              f'--config.model.scheme={scheme} --config.train.steps=2000 --workdir=runs/longer')
  return ('<footer><h2>What was run</h2>' + page.facts(facts)
          + page.table('Seconds by phase', ('phase', 'seconds', 'share'), [*phases, ('all', f'{total:,.1f}', '')])
          + page.details('All settings', page.code('Settings', json.dumps(config, indent=1)))
          + '<h2>How to go on</h2>' + page.code('Commands', commands) + '</footer>')
