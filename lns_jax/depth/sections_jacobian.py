"""Parts of a report on Jacobians: of blocks, of the stack, and the paper's heat maps."""

from collections.abc import Mapping

import numpy as np

from lns_jax.depth import findings, heat, plots, plots_maps
from lns_jax.depth.findings import number
from lns_jax.depth.plots import floats
from lns_jax.depth.sections import Picture, Section, bands, ids_of


def blocks(models: Mapping[str, dict]) -> Section | None:
  """Norms of each block's Jacobian, its distance from the identity, and dy_L/dx_l."""
  measured = findings.with_measure(models, 'distance')
  if not measured:
    return None
  ids = ids_of(models, 'distance')
  curves = {'distance': ('Distance from the identity', '|J - I| / |I|, Frobenius'),
            'spectral': ('Largest singular value', '|J|, spectral'),
            'suffix_frobenius': ('From what enters a layer to the end', '|dy_L/dx_l| / |I|, Frobenius')}
  pictures = [Picture(plots.by_layer(bands(models, measure), ids, unit, title=title), f'{title} by layer')
              for measure, (title, unit) in curves.items()]
  how = ('The Jacobian J of a layer says how a small change of what enters it changes what leaves it, over all tokens '
         'of a sequence (paper eq. 5). A layer that does nothing has the identity I: distance 0. The largest singular '
         'value is by how much a change can grow. The last picture is what is left at the end of the stack of a change '
         'in front of layer l; its first value is of the end-to-end Jacobian of Theorem 3.3.')
  end = findings.listed([f'{number(found["end_to_end"])} in {name} (the product of the layers\' own, which bounds it, '
                         f'is {number(found["spectral_product"])})' for name, found in measured.items()])
  return Section('Jacobians', how, [findings.halves(models, 'distance', 'the distance from the identity'),
                                    f'The largest singular value from end to end is {end}.'], pictures)


def heat_maps(models: Mapping[str, dict], arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Section | None:
  """Figure 5. arrays: name -> 'mean_jacobian' [N, D, D]."""
  measured = {name: found for name, found in findings.with_measure(models, 'mean_dominance').items()
              if 'mean_jacobian' in arrays.get(name, {})}
  if not measured:
    return None
  pictures = [Picture(plots_maps.square(arrays[name]['mean_jacobian'][i], title=f'{name}, layer {l}', diverging=True,
                                        axis='hidden unit', label='mean dy_i / dx_j'),
                      f'Token-averaged Jacobian of layer {l} of {name}')
              for i in range(heat.PANELS) for name, found in measured.items()
              for l in found['mean_jacobian_layers'][i:i + 1]]
  how = ('Entry (i, j) is the derivative of hidden unit i behind the layer by hidden unit j in front of it, of the '
         'same token, averaged over tokens (paper figure 5). The paper reads from such maps that deep blocks come to '
         'resemble the identity: a diagonal with nothing beside it. Colours are cut at the 99.5th percentile of each '
         'map.')
  def say(found):
    values = floats(found['mean_dominance'])
    return f'from {number(values[0])} in layer {found["mean_jacobian_layers"][0]} to {number(values[-1])} in layer ' \
           f'{found["mean_jacobian_layers"][-1]}'
  said = findings.listed([f'{say(found)} of {name}' for name, found in measured.items()])
  return Section('Token-averaged Jacobians', how,
                 [f'The mean size on the diagonal over that off it goes {said}.'], pictures)
