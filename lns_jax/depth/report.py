"""report.html: models compared by loss and by what their depth does, in one file that needs nothing else."""

import json
import pathlib
import shlex
from collections.abc import Mapping

import numpy as np

from lns_jax import files
from lns_jax.depth import findings, page, plots
from lns_jax.depth.findings import number
from lns_jax.depth.plots import Band, Line, floats


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
  sections = (loss_section(schemes, histories), variance_section(schemes, histories), angular_section(schemes),
              removal_section(schemes), influence_section(schemes), branch_section(schemes, histories))
  body = [f'<h1>{page.text(title)}</h1>', *_opening(summary), *sections, _footer(summary, workdir)]
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
  band = _band(found, 'variance')
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
      'mean angle across one layer': measured('angular', lambda s: number(np.nanmean(_across_one(s['angular'])))),
      'mean block influence': measured('block_influence', lambda s: number(np.nanmean(floats(s['block_influence'])))),
  }
  cells = [(label, *map(say, schemes.values())) for label, say in rows.items()]
  return page.table('All numbers', ('', *schemes), cells)


def _band(found: dict, measure: str, scale=floats) -> Band | None:
  """A measure and its interval as arrays; None where the model lacks it. `scale` is applied to all three."""
  if found.get(measure) is None:
    return None
  interval = found.get('intervals', {}).get(measure)
  ends = (scale(interval['low']), scale(interval['high'])) if interval else ()
  return Band(scale(found[measure]), *ends)


def _across_one(angular) -> np.ndarray:
  """[L, L] -> the distances across one layer, [L]."""
  return floats(angular)[0]


def _bands(schemes: Mapping[str, dict], measure: str) -> dict[str, Band | None]:
  return {name: _band(found, measure) for name, found in schemes.items()}


def _ids(schemes: Mapping[str, dict], measure: str) -> list[int]:
  """Layer numbers of the deepest model, for pictures that show all of them."""
  return max((found['layer_ids'] for found in findings.with_measure(schemes, measure).values()), key=len)


def _series(records: list[dict], key: str) -> Line | None:
  """What a history holds of one key."""
  kept = [(r['step'], r[key]) for r in records if r.get(key) is not None]
  return Line(*zip(*kept)) if kept else None


def loss_section(schemes: Mapping[str, dict], histories: Mapping[str, list[dict]]) -> str:
  """Training and validation loss, and the difference to the first model on the same batches."""
  lines = {name: _series(histories.get(name, ()), 'loss') for name in schemes}
  points = {name: _series(histories.get(name, ()), 'val_loss') for name in schemes}
  unit, title = 'loss, nats per token', 'Loss'
  pictures = [plots.svg(plots.over_steps(lines, unit, title=title, points={n: p for n, p in points.items() if p}),
                        'Training and validation loss against optimizer updates')]
  how = ('Lines are the training loss of the logged batches, circles the loss on the validation split, in nats per '
         'token, against optimizer updates.')
  found, (reference, *others) = [], lines
  differences = {name: _difference(lines[name], lines[reference]) if name in others else None for name in lines}
  if any(differences.values()):
    how += f' The second picture subtracts {reference}\'s loss on the same batch: below zero is lower than {reference}.'
    pictures.append(plots.svg(plots.over_steps(differences, 'difference, nats per token', zero=True,
                                               title=f'Difference to {reference}, batch by batch'),
                              f'Difference of the training loss to {reference}'))
    found.append(_differences_found({name: line for name, line in differences.items() if line}, reference))
  return page.section('Loss', how, found, pictures)


def _difference(line: Line | None, reference: Line | None) -> Line | None:
  if line is None or reference is None:
    return None
  other = dict(zip(*reference))
  kept = [(step, value - other[step]) for step, value in zip(*line) if step in other]
  return Line(*zip(*kept)) if kept else None


def _differences_found(differences: Mapping[str, Line], reference: str) -> str:
  def say(name, line):
    late = floats(line.value)[-max(1, len(line.value) // 4):]
    return f'{late.mean():+.4f} for {name} (below zero on {np.sum(late < 0)} of {len(late)} batches)'
  return (f'Over the last quarter of the batches that both logged, the training loss less that of {reference} is on '
          f'average, in nats per token, {findings.listed([say(*item) for item in differences.items()])}.')


def variance_section(schemes: Mapping[str, dict], histories: Mapping[str, list[dict]]) -> str:
  """Output variance by layer at the end and at the start, and of each layer over training."""
  series = {name: _series(histories.get(name, ()), 'variance') for name in schemes}
  how = ('Variance over the hidden units of a token of the residual stream as it leaves each layer, before the final '
         'norm, averaged over tokens (paper section 3, figures 4 and 9; "emb" is the embedding).')
  found, pictures = [], []
  if findings.with_measure(schemes, 'variance'):
    how += ' "After training" is measured on the sample, with its 95% interval shaded.'
    found = [findings.last_variance(schemes), findings.variance_growth(schemes)]
    pictures.append(plots.svg(plots.by_layer(_bands(schemes, 'variance'), _ids(schemes, 'variance'),
                                             'output variance', title='By layer, after training', embedding=True),
                              'Output variance by layer after training, one line a model'))
  if any(series.values()):
    how += (' The other pictures are of training batches. "Over training" follows every layer, dark for the first and '
            'bright for the last, dashed for the embedding; its axis is the same for all models.')
    found.append(_peaks({name: line for name, line in series.items() if line}))
    pictures += _variance_pictures(schemes, series)
  else:
    found.append('No variance was logged during training (train.layer_stats_every is 0).')
  return page.section('Variance of the residual stream', how, found, pictures)


def _variance_pictures(schemes: Mapping[str, dict], series: Mapping[str, Line | None]) -> list[str]:
  logged = {name: line for name, line in series.items() if line}
  ids = {name: schemes[name].get('layer_ids') or range(1, len(line.value[0])) for name, line in logged.items()}
  start = {name: line and Band(line.value[0]) for name, line in series.items()}
  first = min(line.steps[0] for line in logged.values())
  shown = plots.limits(*(line.value for line in logged.values()))
  pictures = [plots.svg(plots.by_layer(start, max(ids.values(), key=len), 'output variance',
                                       title=f'By layer, at update {first:,}', embedding=True),
                        f'Output variance by layer at update {first:,}, one line a model')]
  for name, line in logged.items():
    picture = plots.layers_over_steps(line.steps, line.value, ids[name], 'output variance', shown=shown,
                                      title=f'{name}, over training')
    pictures.append(plots.svg(picture, f'Output variance of each layer of {name} over training'))
  return pictures


def _peaks(series: Mapping[str, Line]) -> str:
  def say(line):
    last = floats(line.value)[:, -1]
    top = int(np.nanargmax(last))
    return f'{number(last[top])} at update {line.steps[top]:,}'
  peaks = [f'{say(line)} in {name}' for name, line in series.items() if np.any(np.isfinite(floats(line.value)[:, -1]))]
  return f'During training the highest logged variance of the last layer was {findings.listed(peaks)}.' if peaks else \
      'During training no finite variance was logged.'


def angular_section(schemes: Mapping[str, dict]) -> str:
  """Heat maps of the angular distance, one colour scale for all."""
  measured = findings.with_measure(schemes, 'angular')
  if not measured:
    return ''
  how = ('The colour of cell (l, n) is the angle between what enters layer l and what enters layer l + n, over pi, '
         'averaged over tokens (paper eq. 1; figures 2, 3 and 7): 0 is the same direction, 0.5 a right angle. Yellow '
         'cells near the bottom are layers that hardly turn the stream. Values are raw, on one scale for all models; '
         'the paper stretches each row to 0..1 before drawing, so its colours are not comparable.')
  found = [findings.halves(schemes, 'angular', 'the angle across one layer', _across_one)]
  top = plots.limits(*(found['angular'] for found in measured.values()))[1]
  pictures = [plots.svg(plots.heat_map(found['angular'], found['layer_ids'], title=name, top=top),
                        f'Heat map of the angular distances between the layers of {name}')
              for name, found in measured.items()]
  return page.section('Angular distance', how, found, pictures)


def removal_section(schemes: Mapping[str, dict]) -> str:
  """Rise of the loss without each layer."""
  measured = findings.with_measure(schemes, 'layer_drop')
  if not measured:
    return ''
  how = ('Each bar is the rise of the loss on the sample when that one layer is taken out and nothing is trained '
         'again, in percent of the loss of the whole model; whiskers are 95% intervals (paper section 2.1 and figure '
         '2, with the loss in place of the score of a task). The axis is linear up to the dashed line at 1% and '
         'logarithmic beyond.')
  percent = {name: _band(found, 'layer_drop', lambda values, found=found: findings.percent(found, values))
             for name, found in measured.items()}
  shown = plots.limits(*(values for band in percent.values() for values in band))
  pictures = [plots.svg(plots.removal_bars(percent[name], found['layer_ids'], index=list(schemes).index(name),
                                           title=name, shown=shown),
                        f'Rise of the loss when each layer of {name} is removed')
              for name, found in measured.items()]
  return page.section('Removal of single layers', how, findings.removal(schemes), pictures)


def influence_section(schemes: Mapping[str, dict]) -> str:
  """Block influence and the angle across one layer, by layer."""
  if not findings.with_measure(schemes, 'block_influence'):
    return ''
  how = ('Block influence is one minus the cosine between what enters and what leaves a layer, averaged over tokens '
         '(ShortGPT, arXiv 2403.03853): 0 is a layer that leaves the direction of the stream as it is. The angle '
         'across one layer is the bottom row of the heat maps, from the same cosine. 95% intervals are shaded.')
  ids = _ids(schemes, 'block_influence')
  angles = {name: _band(found, 'angular', _across_one) for name, found in schemes.items()}
  pictures = [plots.svg(plots.by_layer(_bands(schemes, 'block_influence'), ids, 'block influence',
                                       title='Block influence'), 'Block influence by layer, one line a model'),
              plots.svg(plots.by_layer(angles, ids, 'angular distance', title='Angle across one layer'),
                        'Angular distance across one layer, one line a model')]
  return page.section('What each layer turns', how, [findings.halves(schemes, 'block_influence', 'block influence')],
                      pictures)


def branch_section(schemes: Mapping[str, dict], histories: Mapping[str, list[dict]]) -> str:
  """Size of what attention and MLP add, against the stream, at the last logged update."""
  pictures, found = [], []
  for sub, words in (('attn', 'attention'), ('mlp', 'the MLP')):
    series = {name: _series(histories.get(name, ()), f'{sub}_ratio') for name in schemes}
    bands = {name: line and Band(floats(line.value[-1])) for name, line in series.items()}
    last = {name: {'ratio': band.value} for name, band in bands.items() if band}
    if last:
      ids = max((schemes[name].get('layer_ids') or range(1, len(v['ratio']) + 1) for name, v in last.items()), key=len)
      pictures.append(plots.svg(plots.by_layer(bands, ids, 'branch / stream', title=f'What {words} adds'),
                                f'Size of what {words} adds, relative to the stream, by layer'))
      found.append(findings.halves(last, 'ratio', f'what {words} adds'))
  if not pictures:
    return ''
  how = ('Root mean square of what a sub-layer adds to the residual stream over that of the stream itself, on the '
         'training batch of the last logged update. A branch that is small beside its stream changes it little.')
  return page.section('Residual branches', how, found, pictures)


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
