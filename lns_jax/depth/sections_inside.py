"""Parts of a report on representations and on theory: logit lens, similarity, the paper's predictions."""

from collections.abc import Mapping

from lns_jax.depth import findings, plots
from lns_jax.depth.findings import number
from lns_jax.depth.plots import Band, floats
from lns_jax.depth.sections import Picture, Section, bands, ids_of


def lens(models: Mapping[str, dict]) -> Section | None:
  """Logit lens by layer, and the effective depth."""
  measured = findings.with_measure(models, 'lens_loss')
  if not measured:
    return None
  curves = {'lens_loss': ('Loss of the lens', 'nats'), 'lens_kl': ('Divergence from the final prediction', 'KL, nats'),
            'lens_overlap': ('Overlap of the five highest', 'share')}
  pictures = [Picture(plots.by_layer(bands(models, measure), ids_of(models, 'lens_loss'), unit, title=title,
                                     embedding=True), f'{title}, by layer') for measure, (title, unit) in curves.items()]
  how = ('The final norm and the head applied to the stream as it leaves each layer: what the model would predict if it '
         'stopped there. Effective depth (Hu et al., arXiv 2512.14064) is the first layer that is entered with less than '
         'half of the largest divergence from the final prediction; what is behind refines.')
  def depth(found):
    value = found.get('effective_depth_kl')
    return 'none' if value is None else f'{number(value)} of {found["layers"]}'
  said = findings.listed([f'{depth(found)} in {name}' for name, found in measured.items()])
  return Section('What would be predicted after each layer', how, [f'The effective depth is {said}.'], pictures)


def similarity(models: Mapping[str, dict]) -> Section | None:
  """CKA between states."""
  measured = findings.with_measure(models, 'cka')
  if not measured:
    return None
  pictures = [Picture(plots.square(found['cka'], title=name, label='linear CKA', axis='layer',
                                   ticks=['emb', *map(str, found['layer_ids'])]),
                      f'Linear CKA between the states of {name}') for name, found in measured.items()]
  how = ('Linear CKA (arXiv 1905.00414) between the stream as it leaves any two layers: 1 where one is the other up to '
         'a rotation and a scale. Blocks of high similarity are stretches of layers that change little; yellow is small.')
  def ends(found):
    return number(floats(found['cka'])[len(found['layer_ids']) // 2, -1])
  said = findings.listed([f'{ends(found)} in {name}' for name, found in measured.items()])
  return Section('Similarity of states', how, [f'Between the middle layer and the last it is {said}.'], pictures)


def theory(models: Mapping[str, dict]) -> Section | None:
  """Measured variance beside the paper's predictions and the laws of growth."""
  measured = findings.with_measure(models, 'growth')
  if not measured:
    return None
  pictures = [picture for name, found in measured.items() for picture in _against_theory(name, found)]
  how = ('The variance measured (first line) beside what the lemmas of the paper give from the model\'s own weights: '
         'the recursion of Lemma 3.2 or 4.1 as it is printed, branches of random matrices that are independent of the '
         'stream, and the same branches all in its direction. docs/theory.md says where the derivation does not give '
         'what it states.')
  said = [f'{name}: {found["growth"]}' for name, found in measured.items()]
  said += [f'{name}: {found["theory"]}' for name, found in measured.items() if found.get('theory')]
  return Section('Theory and measurement', how, said, pictures)


def _against_theory(name: str, found: dict) -> list[Picture]:
  curves = {'measured': Band(found['variance']) if found.get('variance') else None}
  curves |= {label: Band(found[key]) for label, key in (
      ('lemma', 'theory_lemma'), ('independent', 'theory_independent'), ('aligned', 'theory_aligned')) if found.get(key)}
  if len(curves) < 2 or not curves['measured']:
    return []
  return [Picture(plots.by_layer(curves, found['layer_ids'], 'output variance', title=f'{name}: variance and theory',
                                 embedding=True), f'Measured variance of {name} and the predictions of the paper')]
