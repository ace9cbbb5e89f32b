"""Parts of a report on what changes of depth cost in the accuracy of a task, in percentage points."""

from collections.abc import Mapping

import numpy as np

from lns_jax.depth import findings, plots, plots_maps
from lns_jax.depth.plots import floats
from lns_jax.depth.sections import Picture, Section, band_of

AXIS = ('Bars are changes in percentage points: below zero the model is worse. Whiskers are 95% intervals over what '
        'the task counts, questions or rows.')


def parts(models: Mapping[str, dict]) -> list[Section | None]:
  """All of them; None where no model has what one shows."""
  return [layers(models), pruning(models), sublayers(models), blocks(models)]


def _points(values) -> np.ndarray:
  return 100 * floats(values)


def _bars(models: Mapping[str, dict], measures: Mapping[str, str]) -> list[Picture]:
  """A picture of each model and each measure ('' or ', without ...' behind the model's name), on one scale."""
  measured = findings.with_measure(models, next(iter(measures)))
  bands = {(name, m): band_of(found, m, _points) for name, found in measured.items() for m in measures}
  shown = plots.limits(*(values for band in bands.values() for values in band))
  return [Picture(plots.change_bars(bands[name, m], found['layer_ids'], index=list(models).index(name),
                                    title=f'{name}{words}', shown=shown),
                  f'Change of task accuracy without each layer of {name}{words}')
          for name, found in measured.items() for m, words in measures.items()]


def layers(models: Mapping[str, dict]) -> Section | None:
  """Change of accuracy without each layer."""
  measured = findings.with_measure(models, 'task_drop')
  if not measured:
    return None
  what = next(iter(measured.values()))['task']['what']
  how = (f'The score is the {what}. One layer is taken out at a time and nothing is trained again: this is the paper\'s'
         f' own measure of a layer (section 2.1, figures 2 and 7). {AXIS}')
  def dearest(found):
    drops = _points(found['task_drop'])
    worst = int(np.nanargmin(drops))
    return f'layer {found["layer_ids"][worst]} ({drops[worst]:+.1f} points)'
  said = findings.listed([f'{dearest(found)} in {name}' for name, found in measured.items()])
  return Section('Task accuracy without each layer', how,
                 [findings.task(models), f'The accuracy changes for the worse, or least for the better, without {said}.'],
                 _bars(models, {'task_drop': ''}))


def sublayers(models: Mapping[str, dict]) -> Section | None:
  """Change of accuracy without each attention and each MLP."""
  measured = findings.with_measure(models, 'task_attn_drop')
  if not measured:
    return None
  def cheap(found, sub):
    return int(np.sum(floats(found[f'task_{sub}_drop']) > -findings.POINT))
  said = [f'{cheap(found, "attn")} attentions and {cheap(found, "mlp")} MLPs of {found["layers"]} in {name}'
          for name, found in measured.items()]
  return Section('Task accuracy without attention or the MLP',
                 f'One attention or one MLP is taken out at a time, its norms and factors included. {AXIS}',
                 [f'Less than one percentage point is the cost of {findings.listed(said)}.'],
                 _bars(models, {'task_attn_drop': ', without attention', 'task_mlp_drop': ', without the MLP'}))


def blocks(models: Mapping[str, dict]) -> Section | None:
  """Accuracy lost without n consecutive layers."""
  measured = findings.with_measure(models, 'task_block_drop')
  if not measured:
    return None
  lost = {name: -_points(found['task_block_drop']) for name, found in measured.items()}
  top = max(plots.limits(*lost.values())[1], 1.0)
  pictures = [Picture(plots_maps.heat_map(lost[name], found['layer_ids'], title=name, top=top,
                                          label='accuracy lost, points', ylabel='n layers removed'),
                      f'Task accuracy lost when n layers from layer l on are removed from {name}')
              for name, found in measured.items()]
  said = findings.listed([findings.longest_block(name, found, lost[name], 100 * findings.POINT)
                          for name, found in measured.items()])
  return Section('Task accuracy without consecutive layers',
                 'Cell (l, n) is the accuracy lost, in percentage points, without the layers l to l + n - 1, on one '
                 'scale for all models; where a model gains, the colour is that of 0.',
                 [f'The longest block that can go for less than one percentage point: {said}.'], pictures)


def pruning(models: Mapping[str, dict]) -> Section | None:
  """Accuracy against the number of layers kept, greedy."""
  measured = findings.with_measure(models, 'task_prune_rise')
  if not measured:
    return None
  def curve(found):
    band = band_of(found, 'task_prune_rise', lambda v: 100 * found['task_prune_baseline'] + np.append(0.0, _points(v)))
    return found['layers'] - np.arange(len(band.value)), band
  chance = next(iter(measured.values()))['task']['chance']
  how = ('The layer whose removal costs least accuracy is taken out, then of the rest the one that costs least then, '
         'and so on, without any retraining: accuracy against the number of layers kept, 95% intervals of the change '
         'shaded. Of equal layers the first goes. Layers are chosen on the rows that they are judged on, so that the '
         'curve flatters.')
  how += '' if chance is None else ' The dashed line is what guessing scores.'
  def order(found):
    first = ', '.join(map(str, found['task_prune_order'][:5]))
    return f'{first}{", ..." if len(found["task_prune_order"]) > 5 else ""}'
  said = findings.listed([f'{order(found)} in {name}' for name, found in measured.items()])
  picture = plots.pareto({name: curve(found) if name in measured else None for name, found in models.items()},
                         'accuracy, %', title='Task accuracy and layers kept',
                         chance=None if chance is None else 100 * chance)
  return Section('Task accuracy and pruning', how, [f'The order begins with {said}.'],
                 [Picture(picture, 'Task accuracy against the number of layers kept, one line a model')])
