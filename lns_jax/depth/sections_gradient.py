"""Parts of a report on gradients: of a loaded model by layer, and each layer's share of the decrease while training."""

from collections.abc import Mapping

import numpy as np

from lns_jax.depth import findings, plots
from lns_jax.depth.gradients import thirds
from lns_jax.depth.plots import Band, floats
from lns_jax.depth.sections import Picture, Section, bands, ids_of

_CURVES = {  # measure -> (title, unit)
    'grad_norm': ('Gradient of the layer\'s parameters', '|g|, nats per unit'),
    'state_grad_norm': ('Gradient of the stream', '|dL/dx|, nats per unit'),
    'taylor': ('Taylor importance', '|theta . g|, nats'),
    'attn_stable_rank': ('Stable rank, attention', '|g|_F^2 / |g|_2^2'),
    'mlp_stable_rank': ('Stable rank, MLP', '|g|_F^2 / |g|_2^2'),
}


def gradients(models: Mapping[str, dict]) -> Section | None:
  """Gradients of the loss by layer."""
  measured = findings.with_measure(models, 'grad_norm')
  if not measured:
    return None
  ids = ids_of(models, 'grad_norm')
  pictures = [Picture(plots.by_layer(bands(models, measure), ids, unit, title=title,
                                     embedding=measure == 'state_grad_norm'), f'{title} by layer')
              for measure, (title, unit) in _CURVES.items()]
  how = ('Gradients of a sequence\'s loss, averaged over sequences, 95% intervals shaded: of a layer\'s parameters, of '
         'the stream that enters each layer ("emb" is what enters the first), the first-order change of the loss '
         'without the layer\'s parameters (|theta . g|, Molchanov et al., arXiv 1906.10771), and the stable rank of '
         'the gradients of its matrices: near 1, all tokens pull the same way.')
  share = lambda found: ' / '.join(f'{100 * v:.0f}%' for v in floats(found['taylor_thirds']))
  said = findings.listed([f'{share(found)} in {name}' for name, found in measured.items()])
  return Section('Gradients', how, [f'Taylor importance of the first, middle and last third of the layers: {said}.'],
                 pictures)


def decrease(models: Mapping[str, dict], histories: Mapping[str, list[dict]]) -> Section | None:
  """Each layer's share of the predicted decrease of the loss while training."""
  logged = {name: found for name, records in histories.items() if (found := _shares(records)) is not None}
  if not logged:
    return None
  curves = {name: Band(logged[name].mean(axis=0)) if name in logged else None for name in models}
  ids = ids_of({name: models[name] for name in logged}, 'layer_ids')
  picture = Picture(plots.by_layer(curves, ids, 'share', title='Share of the decrease while training'),
                    'Share of each layer in the predicted decrease of the loss')
  how = ('Minus the gradient times the update, summed over a layer\'s parameters, is the decrease of the loss that an '
         'update brings by that layer, to first order; shown is its share in that of all layers, averaged over the '
         'second half of the logged updates. With Adam it follows the size of the gradient, so that a fixed factor in '
         'front of a weight makes it smaller without making the layer idle.')
  share = lambda v: ' / '.join(f'{100 * part:.0f}%' for part in thirds(v.mean(axis=0)))
  said = findings.listed([f'{share(v)} in {name}' for name, v in logged.items()])
  return Section('Which layers lower the loss', how,
                 [f'The first, middle and last third of the layers bring {said}.'], [picture])


def _shares(records: list[dict]) -> np.ndarray | None:
  """[records, L] of the second half of the run; None where nothing was logged, or nothing decreased."""
  kept = [floats(r['layer_decrease']) for r in records if r.get('layer_decrease')]
  shares = [v / v.sum() for v in kept[len(kept) // 2:] if np.isfinite(v).all() and v.sum() > 0]
  return np.array(shares) if shares else None
