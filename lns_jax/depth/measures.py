"""The table of measures that a diagnosis takes: what each is called, what it gives, what it costs."""

import dataclasses
from collections.abc import Callable, Sequence

from lns_jax.config import ModelConfig
from lns_jax.depth import gradients, heat, jacobian, perturb, removal, states
from lns_jax.errors import UserError, nearest

Found = dict  # name -> Estimate, or a plain value of numbers, lists and strings


@dataclasses.dataclass(frozen=True)
class Measure:
  """One row of the table.

  Attributes:
    run: (config, params, batches, seed) -> Found; batches can be read again and again.
    passes: L -> its cost in plain forward passes over the batches, roughly; what a bar's ETA is made of.
    share: the part of the sample that it is taken on, so that no measure outweighs all others.
    reads: L -> how often it reads the batches.
    what: one line for the list of measures.
    least: layers that a model must have.
  """

  run: Callable[..., Found]
  passes: Callable[[int], float]
  what: str
  share: float = 1.0
  least: int = 1
  reads: Callable[[int], int] = lambda L: 1


def _pruned(config, params, batches, seed) -> Found:
  found = removal.prune(config, params, batches, seed=seed)
  return {'prune_order': list(found.order), 'prune_rise': found.rise, 'prune_baseline': found.baseline,
          'prunable': found.prunable}


def _heat_maps(config, params, batches, seed) -> Found:
  return heat.mean_jacobian(config, params, batches, seed=seed) | {'jacobian_layers': list(heat.panels(config))}


def _without_baseline(measure: Callable) -> Callable:
  """The baseline of a measure on part of the sample is not the baseline of the whole."""
  def run(config, params, batches, seed):
    found = measure(config, params, batches, seed=seed)
    baseline = found.pop('baseline')
    return found | {f'{next(iter(found))}_baseline': baseline}
  return run


def _plain(measure: Callable) -> Callable:
  return lambda config, params, batches, seed: measure(config, params, batches, seed=seed)


MEASURES = {
    'profile': Measure(_plain(states.profile), lambda L: 1.3,
                       'variance, angles, block influence, branch ratios and cosines, by layer'),
    'layer_drop': Measure(_plain(removal.layer_drop), lambda L: L / 2 + 3,
                          'loss without each layer', least=2),
    'gradients': Measure(_plain(gradients.gradients), lambda L: 4.0,
                         'gradients of parameters and of the stream, Taylor importance, stable ranks, by layer',
                         share=1 / 4),
    'jacobian': Measure(_plain(jacobian.jacobian), lambda L: 200.0,
                        'norms and singular values of the Jacobian of each block and of the whole stack', share=1 / 64),
    'mean_jacobian': Measure(_heat_maps, lambda L: 200.0, 'token-averaged Jacobians of five layers (Figure 5)',
                             share=1 / 256),
    'sublayer_drop': Measure(_without_baseline(removal.sublayer_drop), lambda L: L + 4,
                             'loss without each attention and each MLP', share=1 / 4),
    'perturb': Measure(_without_baseline(perturb.perturb), lambda L: 4 * L + 10,
                       'loss with noise on each layer, with more and less of it, with neighbours swapped', share=1 / 16, least=2),
    'block_drop': Measure(_without_baseline(removal.block_drop), lambda L: L ** 2 / 6 + L,
                          'loss without each block of consecutive layers', share=1 / 16, least=2),
    'prune': Measure(_pruned, lambda L: L ** 2 / 6 + L, 'greedy removal of one layer after another',
                     share=1 / 16, least=2, reads=lambda L: L - 1),
}


def choose(names: Sequence[str], config: ModelConfig) -> dict[str, Measure]:
  """The measures called so, all of them for no names, in the table's order.

  Raises UserError for an unknown one, and for one that was asked for and that the model is too shallow for.
  """
  for name in names:
    if name not in MEASURES:
      raise UserError(f'there is no measure {name!r}.{nearest(name, MEASURES)} There are {", ".join(MEASURES)}.')
    if config.num_layers < MEASURES[name].least:
      raise UserError(f'{name} needs a model with {MEASURES[name].least} layers or more, this one has '
                      f'{config.num_layers}.')
  return {name: m for name, m in MEASURES.items()
          if (name in names if names else config.num_layers >= m.least)}
