"""The parts of a report: how to read some pictures, what was found, and the pictures.

A section function takes `models`, a mapping from names to what was found of each (the keys of depth.json, beside the
losses of a summary), and where it needs them `histories`, a mapping from names to the records of a metrics.jsonl. It
returns None where no model has what it shows.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from lns_jax.depth import findings, page, plots, plots_maps, plots_steps, svg
from lns_jax.depth.findings import number
from lns_jax.depth.plots import Band, Line, floats


ANGLES = {  # how angular distances are shown -> what a reader has to know of it
    'raw': 'Yellow cells near the bottom are layers that hardly turn the stream. Values are raw, on one scale for all '
           'models; the paper stretches each row before drawing, so its colours cannot be compared with these.',
    'percentile': 'Shown as the paper\'s code draws it: each row is cut at its 1st and 99th percentile and stretched '
                  'to 0..1, so that yellow is the smallest angle of that row, however large, and neither rows nor '
                  'models can be compared. The values in depth.json are raw.',
}
SHOWN_UPDATES = (0.1, 0.3, 0.6, 1.0)  # share of the logged updates at which variance is drawn by layer


class Picture(NamedTuple):
  """A figure, words for those who cannot see it, and whether it stands in a row of its own."""

  figure: Figure
  label: str
  alone: bool = False


class Section(NamedTuple):
  """A title, how to read the pictures, sentences on what they show, and the pictures."""

  title: str
  how: str
  found: list[str]
  pictures: list[Picture]

  def html(self) -> str:
    """As a part of a page."""
    return page.section(self.title, self.how, self.found,
                        [(svg.element(p.figure, p.label), p.alone) for p in self.pictures])


def band_of(found: dict, measure: str, scale=floats) -> Band | None:
  """A measure and its interval as arrays; None where the model lacks it. `scale` is applied to all three."""
  if found.get(measure) is None:
    return None
  interval = found.get('intervals', {}).get(measure)
  ends = (scale(interval['low']), scale(interval['high'])) if interval else ()
  return Band(scale(found[measure]), *ends)


def across_one(angular) -> np.ndarray:
  """[L, L] -> the distances across one layer, [L]."""
  return floats(angular)[0]


def bands(models: Mapping[str, dict], measure: str) -> dict[str, Band | None]:
  return {name: band_of(found, measure) for name, found in models.items()}


def ids_of(models: Mapping[str, dict], measure: str) -> list[int]:
  """Layer numbers of the deepest model, for pictures that show all of them."""
  return max((found['layer_ids'] for found in findings.with_measure(models, measure).values()), key=len)


def _series(records: list[dict], key: str) -> Line | None:
  """What a history holds of one key."""
  kept = [(r['step'], r[key]) for r in records if r.get(key) is not None]
  return Line(*zip(*kept)) if kept else None


def loss(models: Mapping[str, dict], histories: Mapping[str, list[dict]]) -> Section:
  """Training and validation loss, and the difference to the first model on the same batches."""
  lines = {name: _series(histories.get(name, ()), 'loss') for name in models}
  points = {name: _series(histories.get(name, ()), 'val_loss') for name in models}
  unit, title = 'loss, nats per token', 'Loss'
  pictures = [Picture(plots_steps.over_steps(lines, unit, title=title, points={n: p for n, p in points.items() if p}),
                      'Training and validation loss against optimizer updates')]
  how = ('Lines are the training loss of the logged batches, circles the loss on the validation split, in nats per '
         'token, against optimizer updates.')
  found, (reference, *others) = [], lines
  differences = {name: _difference(lines[name], lines[reference]) if name in others else None for name in lines}
  if any(differences.values()):
    how += f' The second picture subtracts {reference}\'s loss on the same batch: below zero is lower than {reference}.'
    pictures.append(Picture(plots_steps.over_steps(differences, 'difference, nats per token', zero=True,
                                                   title=f'Difference to {reference}, batch by batch'),
                            f'Difference of the training loss to {reference}'))
    found.append(_differences_found({name: line for name, line in differences.items() if line}, reference))
  return Section('Loss', how, found, pictures)


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


def variance(models: Mapping[str, dict], histories: Mapping[str, list[dict]]) -> Section | None:
  """Output variance by layer, after training and at some updates, and of each layer over training."""
  series = {name: _series(histories.get(name, ()), 'variance') for name in models}
  logged = {name: line for name, line in series.items() if line}
  measured = findings.with_measure(models, 'variance')
  if not measured and not histories:
    return None
  how = ('How large the numbers are that layers hand on: the variance over the hidden units of a token, as the '
         'residual stream leaves each layer and before the final norm, averaged over tokens (paper figures 4, 8 and '
         '9). "emb" is the embedding, which enters the first layer. Where the stream grows, what a layer adds to it '
         'weighs less and less.')
  found, pictures = [], []
  if measured:
    how += ' "After training" is measured on the sample, its 95% interval shaded.'
    found = [findings.last_variance(models), findings.variance_growth(models)]
    pictures.append(Picture(plots.by_layer(bands(models, 'variance'), ids_of(models, 'variance'), 'output variance',
                                           title='By layer, after training', embedding=True),
                            'Output variance by layer after training, one line a model', alone=True))
  if logged:
    how += (' The other pictures are of training batches: "while training" has a line for each of a few updates, the '
            'last the darkest; "over training" a line for each layer, dark for the first, bright for the last, dashed '
            'for the embedding. Each kind has one axis for all models.')
    found += _peaks(logged)
    pictures += _while_training(models, logged) + _over_training(models, logged)
  else:
    found.append('No variance was logged during training (train.layer_stats_every is 0, or the model is no run).')
  return Section('Variance of the residual stream', how, found, pictures)


def _ids(models: Mapping[str, dict], name: str, line: Line) -> Sequence[int]:
  """A diverged model has no measures, and so no list of its layers."""
  return models[name].get('layer_ids') or range(1, len(line.value[0]))


def _while_training(models: Mapping[str, dict], logged: Mapping[str, Line]) -> list[Picture]:
  def spread(line):
    rows = [i for i, row in enumerate(line.value) if np.isfinite(floats(row)).any()]
    kept = sorted({rows[round(share * (len(rows) - 1))] for share in SHOWN_UPDATES}) if rows else []
    return Line([line.steps[i] for i in kept], [line.value[i] for i in kept])
  lines = {name: few for name, line in logged.items() if (few := spread(line)).steps}
  shown = plots.limits(*(line.value for line in lines.values()))
  return [Picture(plots_steps.by_layer_at_steps(*line, _ids(models, name, line), 'output variance', shown=shown,
                                                title=f'{name}, while training'),
                  f'Output variance by layer of {name} at some updates') for name, line in lines.items()]


def _over_training(models: Mapping[str, dict], logged: Mapping[str, Line]) -> list[Picture]:
  shown = plots.limits(*(line.value for line in logged.values()))
  return [Picture(plots_steps.layers_over_steps(*line, _ids(models, name, line), 'output variance', shown=shown,
                                                title=f'{name}, over training'),
                  f'Output variance of each layer of {name} over training') for name, line in logged.items()]


def _peaks(series: Mapping[str, Line]) -> list[str]:
  def say(line):
    last = floats(line.value)[:, -1]
    top = int(np.nanargmax(last))
    return f'{number(last[top])} at update {line.steps[top]:,}'
  peaks = [f'{say(line)} in {name}' for name, line in series.items() if np.any(np.isfinite(floats(line.value)[:, -1]))]
  return [f'During training the highest logged variance of the last layer was {findings.listed(peaks)}.' if peaks else
          'During training no finite variance was logged.']


def angular(models: Mapping[str, dict], angles: str = 'raw', measure: str = 'angular') -> Section | None:
  """Heat maps of the angular distance; angles: one of ANGLES. measure: 'angular', or 'angular_last' of last tokens."""
  measured = findings.with_measure(models, measure)
  if not measured:
    return None
  last = ', last tokens' if measure == 'angular_last' else ''
  tokens = 'the last tokens of the rows alone, as in the paper\'s code' if last else 'tokens'
  how = ('Cell (l, n) is the angle between what enters layer l and what enters layer l + n, over pi, averaged over '
         f'{tokens} (paper eq. 1; figures 2, 3 and 7): 0 is the same direction, 0.5 a right angle. {ANGLES[angles]}')
  found = [findings.halves(models, measure, 'the angle across one layer', across_one)]
  shown = {name: floats(found[measure]) for name, found in measured.items()}
  top, label, words = plots.limits(*shown.values())[1], 'angular distance', ''
  if angles == 'percentile':
    shown = {name: plots_maps.by_row_percentile(values) for name, values in shown.items()}
    top, label, words = 1.0, 'angle, stretched within its row', ', rows stretched'
  words = last + words
  pictures = [Picture(plots_maps.heat_map(values, measured[name]['layer_ids'], title=f'{name}{words}', top=top,
                                          label=label),
                      f'Heat map of the angular distances between the layers of {name}{words}')
              for name, values in shown.items()]
  return Section(f'Angular distance{last}', how, found, pictures)


def removal(models: Mapping[str, dict]) -> Section | None:
  """Rise of the loss without each layer."""
  measured = findings.with_measure(models, 'layer_drop')
  if not measured:
    return None
  how = ('Each bar is the rise of the loss on the sample when that one layer is taken out and nothing is trained '
         'again, in percent of the loss of the whole model; whiskers are 95% intervals (paper section 2.1 and figure '
         '2, with the loss in place of the score of a task). The axis is linear up to the dashed line at 1% and '
         'logarithmic beyond.')
  percent = {name: band_of(found, 'layer_drop', lambda values, found=found: findings.percent(found, values))
             for name, found in measured.items()}
  shown = plots.limits(*(values for band in percent.values() for values in band))
  pictures = [Picture(plots.removal_bars(percent[name], found['layer_ids'], index=list(models).index(name),
                                         title=name, shown=shown),
                      f'Rise of the loss when each layer of {name} is removed')
              for name, found in measured.items()]
  return Section('Removal of single layers', how, findings.removal(models), pictures)


def influence(models: Mapping[str, dict]) -> Section | None:
  """Block influence and the angle across one layer, by layer."""
  if not findings.with_measure(models, 'block_influence'):
    return None
  how = ('Block influence is one minus the cosine between what enters and what leaves a layer, averaged over tokens '
         '(ShortGPT, arXiv 2403.03853): 0 is a layer that leaves the direction of the stream as it is. The angle '
         'across one layer is the bottom row of the heat maps, from the same cosine. 95% intervals are shaded.')
  ids = ids_of(models, 'block_influence')
  angles = {name: band_of(found, 'angular', across_one) for name, found in models.items()}
  pictures = [Picture(plots.by_layer(bands(models, 'block_influence'), ids, 'block influence',
                                     title='Block influence'), 'Block influence by layer, one line a model'),
              Picture(plots.by_layer(angles, ids, 'angular distance', title='Angle across one layer'),
                      'Angular distance across one layer, one line a model')]
  return Section('What each layer turns', how, [findings.halves(models, 'block_influence', 'block influence')],
                 pictures)


def branches(models: Mapping[str, dict], histories: Mapping[str, list[dict]]) -> Section | None:
  """Size of what attention and MLP add, against the stream: on the sample, or at the last logged update."""
  pictures, found = [], []
  for sub, words in (('attn', 'attention'), ('mlp', 'the MLP')):
    key = f'{sub}_ratio'
    curves = {name: band_of(models[name], key) or _last(_series(histories.get(name, ()), key)) for name in models}
    last = {name: {'ratio': band.value} for name, band in curves.items() if band}
    if last:
      ids = max((models[name].get('layer_ids') or range(1, len(v['ratio']) + 1) for name, v in last.items()), key=len)
      pictures.append(Picture(plots.by_layer(curves, ids, 'branch / stream', title=f'What {words} adds'),
                              f'Size of what {words} adds, relative to the stream, by layer'))
      found.append(findings.halves(last, 'ratio', f'the size of what {words} adds'))
  if not pictures:
    return None
  on = 'sample' if findings.with_measure(models, 'attn_ratio') else 'training batch of the last logged update'
  how = ('Root mean square of what a sub-layer adds to the residual stream over that of the stream itself, on the '
         f'{on}. A branch that is small beside its stream changes it little.')
  return Section('Residual branches', how, found, pictures)


def _last(line: Line | None) -> Band | None:
  return line and Band(floats(line.value[-1]))


def cosines(models: Mapping[str, dict]) -> Section | None:
  """Direction of what each layer adds, relative to the stream."""
  if not findings.with_measure(models, 'layer_cosine'):
    return None
  how = ('Cosine between what is added to the residual stream and the stream that it is added to, averaged over tokens '
         '(Csordas et al., arXiv 2505.13898): near 0 something new is written, below 0 something is erased, above 0 '
         'what is there is made larger. The layer as a whole is compared with what enters it.')
  pictures = [Picture(plots.by_layer(bands(models, f'{part}_cosine'), ids_of(models, 'layer_cosine'), 'cosine',
                                     title=f'{words} with the stream'), f'Cosine of what {words} adds, by layer')
              for part, words in (('attn', 'Attention'), ('mlp', 'MLP'), ('layer', 'Layer'))]
  found = [findings.halves(models, 'layer_cosine', 'the cosine of what a layer adds')]
  return Section('Direction of what is added', how, found, pictures)
