"""Parts of a report on representations and on theory: logit lens, similarity, projections, the paper's predictions."""

from collections.abc import Mapping

import numpy as np

from lns_jax.depth import findings, plots, plots_maps
from lns_jax.depth.findings import number
from lns_jax.depth.plots import Band, floats
from lns_jax.depth.sections import Picture, Section, band_of, bands, ids_of


def lens(models: Mapping[str, dict]) -> Section | None:
  """Logit lens by layer, and the effective depth."""
  measured = findings.with_measure(models, 'lens_loss')
  if not measured:
    return None
  curves = {'lens_loss': ('Loss of the lens', 'nats'),
            'lens_reverse_kl': ('Divergence from the final prediction', 'KL, nats'),
            'lens_overlap': ('Overlap of the five highest', 'share')}
  pictures = [Picture(plots.by_layer(bands(models, measure), ids_of(models, 'lens_loss'), unit, title=title,
                                     embedding=True), f'{title}, by layer')
              for measure, (title, unit) in curves.items()]
  how = ('The final norm and the head applied to the stream as it leaves each layer: what the model would predict if '
         'it stopped there. Effective depth (Hu et al., arXiv 2512.14064) is the first layer that is entered with less '
         'than half of the largest divergence from the final prediction; the layers behind it refine what is already '
         'there.')
  def depth(found):
    value = found.get('effective_depth_kl')
    ends = (found['intervals']['effective_depth_kl'][end] for end in ('low', 'high'))
    return 'none' if value is None else f'{findings.counted(value, *ends)} of {found["layers"]} layers'
  said = findings.listed([f'{depth(found)} in {name}' for name, found in measured.items()])
  return Section('What would be predicted after each layer', how, [f'The effective depth is {said}.'], pictures)


def similarity(models: Mapping[str, dict]) -> Section | None:
  """CKA between states."""
  measured = findings.with_measure(models, 'cka')
  if not measured:
    return None
  shown = plots.limits(*(found['cka'] for found in measured.values()))
  pictures = [Picture(plots_maps.square(found['cka'], title=name, label='linear CKA', axis='layer', shown=shown,
                                        ticks=['emb', *map(str, found['layer_ids'])]),
                      f'Linear CKA between the states of {name}') for name, found in measured.items()]
  how = ('Linear CKA (arXiv 1905.00414) between the stream as it leaves any two layers: 1 where one is the other up to '
         'a rotation and a scale. Dark blocks are stretches of layers that change little. One scale for all models.')
  def ends(found):
    return number(floats(found['cka'])[len(found['layer_ids']) // 2, -1])
  said = findings.listed([f'{ends(found)} in {name}' for name, found in measured.items()])
  return Section('Similarity of states', how, [f'Between the middle layer and the last it is {said}.'], pictures)


def theory(models: Mapping[str, dict]) -> Section | None:
  """Measured variance beside the paper's predictions and the laws of growth."""
  measured = findings.with_measure(models, 'growth')
  if not measured:
    return None
  curves = {name: drawn for name, found in measured.items() if (drawn := _against_theory(found))}
  shown = plots.limits(*(band.value for drawn in curves.values() for band in drawn.values()))
  pictures = [Picture(plots.by_layer(drawn, measured[name]['layer_ids'], 'output variance', embedding=True, shown=shown,
                                     title=f'{name}: variance and theory'),
                      f'Measured variance of {name} and the predictions of the paper')
              for name, drawn in curves.items()]
  how = ('How fast the variance grows with the layer\'s number l, by the one law that is not ruled out, if there '
         'is one ("off by" is its typical error; drawn is the nearest), and beside it what the paper\'s lemmas give from '
         'the model\'s own weights: "lemma", the '
         'recursion of Lemma 3.2 or 4.1 as it is printed; "independent", random matrices whose output has nothing to '
         'do with the stream; "aligned", the same with all output in the direction of the stream. docs/theory.md says '
         'where the derivation does not give what it states.')
  said = [f'{name}: {found["growth"]}' for name, found in measured.items()]
  bounds = [f'{words} in {name}' for name, found in measured.items() if (words := _bound(found))]
  if bounds:
    said.append('The bound of Theorem 3.3 or 4.2 on the spectral norm of the whole stack\'s Jacobian, at the model\'s own '
                f'weights and variances, is {findings.listed(bounds)}.')
  said += [f'{name}: {found["theory"]}' for name, found in measured.items() if found.get('theory')]
  return Section('Theory and measurement', how, said, pictures)


def _against_theory(found: dict) -> dict[str, Band]:
  """Curves of one picture; none where there is nothing to compare."""
  curves = {'measured': band_of(found, 'theory_variance')}
  for name, law in list(found.get('growth_laws', {}).items())[:1]:  # the nearest
    curves[f'{name} law'] = Band([np.nan, *law['curve']])
  curves |= {label: Band(found[f'theory_{label}']) for label in ('lemma', 'independent', 'aligned')
             if found.get(f'theory_{label}')}
  return curves if len(curves) > 1 else {}


def _bound(found: dict) -> str:
  """Theorem 3.3 or 4.2 beside the measured end-to-end Jacobian; empty without the bound."""
  if not found.get('theory_log_bound'):
    return ''
  measured = f'; measured: e^{np.log(found["end_to_end"]):.1f}' if found.get('end_to_end') else ''
  return f'e^{found["theory_log_bound"][-1]:.1f}{measured}'


_METHODS = {  # name of the measure -> (title, how points are placed)
    'projection': ('States in a plane', 'placed by the two directions in which the states of that layer differ most '
                   '(principal components; the percentage is the part of all differences that the panel shows)'),
    'tsne': ('States in a plane, by t-SNE', 'placed by t-SNE, which puts tokens of similar states side by side and '
             'means nothing by the distances between groups'),
}


def projection(models: Mapping[str, dict], arrays: Mapping[str, Mapping[str, np.ndarray]],
               measure: str = 'projection') -> Section | None:
  """States of some layers as points. measure: a key of _METHODS. arrays: name -> the measure's arrays."""
  measured = {name: found for name, found in findings.with_measure(models, f'{measure}_layers').items()
              if f'{measure}_points' in arrays.get(name, {})}
  if not measured:
    return None
  title, placed = _METHODS[measure]
  pictures = [Picture(_scattered(name, found, arrays[name], measure),
                      f'States of sampled tokens of {name} in a plane, by layer: {measure}')
              for name, found in measured.items()]
  of_text = {name: found for name, found in measured.items() if f'{measure}_frequency' in arrays[name]}
  shade = 'how often its token occurs in the sample: yellow is common, dark is rare' if of_text else \
      'its place in the image'
  how = (f'Each panel is the stream as it leaves one layer ("emb": the embedding), each dot one token of the sample, '
         f'{placed}. The colour of a dot is {shade}. Axes have no unit and a scale of their own in each panel.')
  found = []
  if of_text and measure == 'projection':
    how += ' Where dots of one colour keep together, the two directions still tell common tokens from rare ones.'
    def told(name, found):
      shares = [number(_told(points, arrays[name][f'{measure}_frequency']), 2) for points in
                arrays[name][f'{measure}_points']]
      last = found[f'{measure}_layers'][-1]
      return f'from {shares[0]} at the embedding to {shares[-1]} behind layer {last} in {name}'
    found = ['The share of the variance of log frequency that the two directions explain (R² of a linear fit) goes '
             f'{findings.listed([told(*item) for item in of_text.items()])}.']
  return Section(title, how, found, pictures)


def _scattered(name: str, found: dict, arrays: Mapping[str, np.ndarray], measure: str):
  explained = found.get(f'{measure}_explained')
  panels = {}
  for i, l in enumerate(found[f'{measure}_layers']):
    share = f', {100 * sum(explained[i]):.0f}%' if explained else ''
    panels[f'layer {l}{share}' if l else f'emb{share}'] = arrays[f'{measure}_points'][i]
  if f'{measure}_frequency' in arrays:
    return plots_maps.scatters(panels, 1000 * arrays[f'{measure}_frequency'], title=name, log=True,
                               label='occurrences of its token in 1,000')
  return plots_maps.scatters(panels, arrays[f'{measure}_position'], title=name, label='position in the image')


def _told(points: np.ndarray, frequency: np.ndarray) -> float:
  """R² of the least-squares fit of log frequency [N] on both axes of points [N, 2]; NaN where all are as frequent."""
  y = np.log(frequency) - np.mean(np.log(frequency))
  x = points - points.mean(axis=0)
  left = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
  with np.errstate(invalid='ignore'):
    return 1 - np.sum(left ** 2) / np.sum(y ** 2)
