"""Parts of a report on what changes of depth cost: sub-layers, blocks of layers, pruning, perturbation, linear maps."""

from collections.abc import Mapping

import numpy as np

from lns_jax.depth import findings, plots, plots_maps
from lns_jax.depth.perturb import NOISES, SCALES
from lns_jax.depth.plots import Band, floats
from lns_jax.depth.sections import Picture, Section, band_of, ids_of


def _percent(found: dict, measure: str, baseline: str, pick=floats) -> Band | None:
  """A change of the loss and its interval, in percent of the whole model's loss on the same rows."""
  return band_of(found, measure, lambda values: 100 * pick(values) / found[baseline])


def sublayers(models: Mapping[str, dict]) -> Section | None:
  """Rise of the loss without each attention and each MLP."""
  measured = findings.with_measure(models, 'attn_drop')
  if not measured:
    return None
  parts = {name: {sub: _percent(found, f'{sub}_drop', 'attn_drop_baseline') for sub in ('attn', 'mlp')}
           for name, found in measured.items()}
  shown = plots.limits(*(v for part in parts.values() for band in part.values() for v in band))
  pictures = [
      Picture(plots.removal_bars(parts[name][sub], found['layer_ids'], index=list(models).index(name),
                                 title=f'{name}, without {words}', shown=shown),
              f'Rise of the loss when {words} of each layer of {name} is removed')
      for name, found in measured.items() for sub, words in (('attn', 'attention'), ('mlp', 'the MLP'))]
  how = ('As in the removal of single layers, with one attention or one MLP taken out at a time, its norms and factors '
         'included. A layer whose attention costs nothing while its MLP does works without looking at other tokens.')
  def cheap(found, sub):
    rises = 100 * floats(found[f'{sub}_drop']) / found['attn_drop_baseline']
    return f'{int(np.sum(rises < findings.SMALL))} of {found["layers"]}'
  said = [f'{cheap(found, "attn")} attentions and {cheap(found, "mlp")} MLPs in {name}'
          for name, found in measured.items()]
  return Section('Removal of attention and of the MLP', how,
                 [f'Removable one at a time at less than {findings.SMALL:g}% more loss: {findings.listed(said)}.'],
                 pictures)


def blocks(models: Mapping[str, dict]) -> Section | None:
  """Rise of the loss without n consecutive layers."""
  measured = findings.with_measure(models, 'block_drop')
  if not measured:
    return None
  grids = {name: 100 * floats(found['block_drop']) / found['block_drop_baseline'] for name, found in measured.items()}
  top = plots.limits(*grids.values())[1]
  pictures = [Picture(plots_maps.heat_map(grids[name], found['layer_ids'], title=name, top=top, symlog=True,
                                          label='rise of the loss, %', ylabel='n layers removed'),
                      f'Rise of the loss when n layers from layer l on are removed from {name}')
              for name, found in measured.items()]
  how = ('Cell (l, n) is the rise of the loss, in percent, without the layers l to l + n - 1 (the blocks that Gromov '
         'et al., arXiv 2403.17887, cut). Colours are linear up to 1% and logarithmic beyond, on one scale for all '
         'models.')
  said = [findings.longest_block(name, found, grids[name], findings.SMALL) for name, found in measured.items()]
  return Section('Removal of consecutive layers', how,
                 [f'The longest block that can go at less than {findings.SMALL:g}% more loss: {findings.listed(said)}.'],
                 pictures)


def pruning(models: Mapping[str, dict]) -> Section | None:
  """Loss against the number of layers kept, greedy."""
  measured = findings.with_measure(models, 'prune_rise')
  if not measured:
    return None
  def curve(found):
    band = band_of(found, 'prune_rise', lambda rise: found['prune_baseline'] + np.append(0.0, floats(rise)))
    return found['layers'] - np.arange(len(band.value)), band
  curves = {name: curve(found) if name in measured else None for name, found in models.items()}
  how = ('The layer whose removal costs least is taken out, then of the rest the one that costs least then, and so on, '
         'without any retraining. Read the picture from the whole model on the right to the left; 95% intervals are '
         'shaded. The longer a line stays flat, the more of the depth could go; of two models the lower line has the '
         'lower loss. Layers are chosen and judged on the same rows, which flatters the curve a little, and these are '
         'fewer than those of the scorecard\'s loss (see the end of the page), so that the loss on the right is another.')
  def order(found):
    return findings.listed([str(l) for l in found['prune_order'][:5]])
  def count(found):
    return findings.counted(found['prunable'], *(found['intervals']['prunable'][end] for end in ('low', 'high')))
  said = [f'{count(found)} of {found["layers"]} layers of {name} can go together at less than {findings.SMALL:g}% more '
          f'loss; the first to go are {order(found)}.' for name, found in measured.items()]
  picture = Picture(plots.pareto(curves, 'loss, nats per token', title='Loss and layers kept'),
                    'Loss against the number of layers kept, one line a model')
  return Section('Pruning', how, said, [picture])


def perturbation(models: Mapping[str, dict]) -> Section | None:
  """Rise of the loss under noise, scaling and swaps."""
  measured = findings.with_measure(models, 'noise')
  if not measured:
    return None
  ids = ids_of(models, 'noise')
  def picture(measure, title, label, pick=floats, layers=ids):
    curves = {name: _percent(found, measure, 'noise_baseline', pick) if name in measured else None
              for name, found in models.items()}
    return Picture(plots.by_layer(curves, layers, 'rise of the loss, %', title=title), label)
  pictures = [picture('noise', f'Noise, {size:g} of what the layer adds', f'Rise of the loss under noise of {size:g}',
                      lambda v, i=i: floats(v)[i]) for i, size in enumerate(NOISES)]
  pictures += [picture('scale', f'What the layer adds, times {factor:g}',
                       f'Rise of the loss at {factor:g} times the layer',
                       lambda v, i=i: floats(v)[i]) for i, factor in enumerate(SCALES) if factor]
  pictures.append(picture('swap', 'Layers l and l + 1 swapped', 'Rise of the loss when neighbours are swapped',
                          layers=ids[:-1]))
  how = ('One layer at a time is perturbed and all others are left as they are: Gaussian noise as large as a share of '
         'what the layer adds, token by token; more or less of what it adds; the layer and its successor in the other '
         'order. The paper calls a layer ineffective that can be pruned or perturbed without notice.')
  def swaps(found):
    rises = 100 * floats(found['swap']) / found['noise_baseline']
    return f'{int(np.sum(rises < findings.SMALL))} of {len(rises)}'
  said = [f'{swaps(found)} neighbouring pairs of {name}' for name, found in measured.items()]
  return Section('Perturbation', how,
                 [f'Swapped at less than {findings.SMALL:g}% more loss: {findings.listed(said)}.'], pictures)


def linear(models: Mapping[str, dict]) -> Section | None:
  """Rise of the loss with each layer replaced by a linear map."""
  measured = findings.with_measure(models, 'linear_rise')
  if not measured:
    return None
  percent = {name: _percent(found, 'linear_rise', 'linear_baseline') for name, found in measured.items()}
  shown = plots.limits(*(values for band in percent.values() for values in band))
  pictures = [Picture(plots.removal_bars(percent[name], found['layer_ids'], index=list(models).index(name), title=name,
                                         shown=shown, xlabel='replaced layer'),
                      f'Rise of the loss when each layer of {name} is replaced by a linear map')
              for name, found in measured.items()]
  how = ('Each layer\'s addition to the stream is replaced by a linear map of the stream, fitted by least squares on '
         'one half of the sample and judged on the other (arXiv 2603.15389). A layer that costs nothing so does linear '
         'work.')
  said = findings.listed([f'{100 * found["usefulness"]:.0f}% in {name}' for name, found in measured.items()])
  return Section('Replacement by a linear map', how,
                 [f'The share of layers whose replacement raises the loss by more than 10% is {said}.'], pictures)
