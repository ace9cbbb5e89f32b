"""The table of measures that a diagnosis takes: what each is called, what it gives, what it costs."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import growth, heat, lens, linear, projection, removal, similarity, states, theory
from lns_jax.depth.estimate import Estimate
from lns_jax.depth.gradients import gradients  # functions of their modules' names
from lns_jax.depth.jacobian import jacobian
from lns_jax.depth.perturb import NOISES, SCALES, perturb
from lns_jax.depth.spectral import LEVELS
from lns_jax.errors import UserError, nearest
from lns_jax.models import transformer

Found = dict  # name -> Estimate, or a plain value of numbers, lists and strings


@dataclasses.dataclass(frozen=True)
class Measure:
  """One row of the table.

  Attributes:
    run: (config, params, batches, *, seed) -> Found; batches can be read again and again. A task's measure takes a
      score_fn too, see `interventions.ScoreFn`.
    passes: config -> its cost in plain forward passes over the batches, roughly; what a bar's ETA is made of.
    share: the part of the sample that it is taken on, so that no measure outweighs all others.
    reads: config -> how often it reads the batches.
    what: one line for the list of measures.
    least: layers that a model must have.
    task: whether it is about the score of a task, on the rows of that.
    asked_only: taken only when it is named.
    ready: raises UserError where what it needs is not installed.
    arrays: what of it is kept in its .npz alone, for reports and programs, and not in depth.json.
  """

  run: Callable[..., Found]
  passes: Callable[[ModelConfig], float]
  what: str
  share: float = 1.0
  least: int = 1
  reads: Callable[[ModelConfig], int] = lambda config: 1
  task: bool = False
  asked_only: bool = False
  ready: Callable[[], object] = lambda: None
  arrays: tuple[str, ...] = ()


def _pruned(config, params, batches, *, seed, **score) -> Found:
  found = removal.prune(config, params, batches, seed=seed, **score)
  kept = {'prune_order': list(found.order), 'prune_rise': found.rise, 'prune_baseline': found.baseline}
  return kept if found.prunable is None else kept | {'prunable': found.prunable}


def _last_token(config, params, batches, *, seed) -> Found:
  found = states.profile(config, params, batches, tokens='last', seed=seed)
  return {f'{key}_last': found[key] for key in ('variance', 'angular', 'block_influence', 'zero_vectors')}


def _heat_maps(config, params, batches, *, seed) -> Found:
  found = heat.mean_jacobian(config, params, batches, seed=seed)
  return {f'mean_{name}' if name != 'noise' else 'dominance_noise': value for name, value in found.items()} | {
      'mean_jacobian_layers': list(heat.panels(config))}


def _projected(name: str, method: str) -> Callable[..., Found]:
  """States of the embedding and of the layers of Figure 5 in a plane, under `name`."""
  def run(config, params, batches, *, seed):
    layers = heat.panels(config)
    at = (0, *(config.layer_ids.index(l) + 1 for l in layers))
    found = projection.project(config, params, batches, method=method, tokens=800, per_sequence=40, at=at, seed=seed)
    return {f'{name}_{key}': value for key, value in found.items()} | {f'{name}_layers': [0, *layers]}
  return run


def _projected_arrays(name: str) -> tuple[str, ...]:
  return tuple(f'{name}_{key}' for key in ('points', 'sequence', 'position', 'token', 'frequency'))


def _perturbed(config, params, batches, *, seed) -> Found:
  found = perturb(config, params, batches, seed=seed)
  return {'noise_baseline': found.pop('baseline'), **found, 'noise_sizes': list(NOISES),
          'scale_factors': list(SCALES)}


def _jacobians(config, params, batches, *, seed) -> Found:
  return jacobian(config, params, batches, seed=seed) | {'spectrum_levels': list(LEVELS)}


def _all_blocks(config: ModelConfig) -> float:
  """Suffixes of all blocks of layers, which pruning tries about as many of."""
  return config.num_layers ** 2 / 6 + config.num_layers


def _theory(config, params, batches, *, seed) -> Found:
  variance = states.means(config, params, batches, seed=seed)['variance']
  each = variance.each()
  each = each[np.isfinite(each).all(axis=1)]  # a replicate may have drawn no sequence at all
  found = {'theory_variance': variance.estimate()}
  try:
    laws = growth.growth(each, variance.tokens)
    found |= {'growth': laws.sentence(), 'growth_laws': laws.record()}
  except UserError as e:
    found['growth'] = str(e)
  try:
    T = config.num_tokens if config.family == 'vit' else next(iter(batches))[transformer.family(config).INPUT].shape[1]
    constants = theory.constants(config, params, T)
    predicted = theory.predicted_variance(config, constants, float(each[0, 0]))
    bound = Estimate.of(theory.log_jacobian_bound(config, constants, each), variance.tokens)
    found |= {f'theory_{name}': values for name, values in predicted.items()} | {'theory_log_bound': bound}
  except UserError as e:
    found['theory'] = str(e)
  return found


def _without_baseline(measure: Callable) -> Callable:
  """The baseline of a measure on part of the sample is not the baseline of the whole."""
  def run(config, params, batches, *, seed, **score):
    found = measure(config, params, batches, seed=seed, **score)
    baseline = found.pop('baseline')
    return found | {f'{next(iter(found))}_baseline': baseline}
  return run


LOSS = {
    'profile': Measure(states.profile, lambda c: 1.3,
                       'variance, angles, block influence, branch ratios and cosines, by layer'),
    'last_token': Measure(_last_token, lambda c: 1.3, 'variance, angles and block influence of the last token of each '
                          "row alone, as in the paper's code", asked_only=True),
    'layer_drop': Measure(removal.layer_drop, lambda c: c.num_layers / 2 + 3,
                          'loss without each layer', least=2),
    'lens': Measure(lens.logit_lens, lambda c: c.num_layers / 4 + 1,
                    'what the model would predict after each layer: loss, divergence and overlap', share=1 / 4),
    'cka': Measure(similarity.cka, lambda c: 2.0, 'linear CKA between all states', share=1 / 4),
    'projection': Measure(_projected('projection', 'pca'), lambda c: 2.0,
                          'states of the embedding and of five layers in a plane, by principal components',
                          share=1 / 64, arrays=_projected_arrays('projection')),
    'tsne': Measure(_projected('tsne', 'tsne'), lambda c: 20.0, 'the same by t-SNE, which needs scikit-learn',
                    share=1 / 64, asked_only=True, ready=projection.tsne, arrays=_projected_arrays('tsne')),
    'linear': Measure(linear.replaceability, lambda c: c.num_layers / 2 + 4,
                      'loss with each layer replaced by a linear map', share=1 / 2, least=2, reads=lambda c: 2),
    'theory': Measure(_theory, lambda c: 1.3, "the paper's lemmas and bounds at the model's own weights, law of growth",
                      share=1 / 4),
    'gradients': Measure(gradients, lambda c: 4.0,
                         'gradients of parameters and of the stream, Taylor importance, stable ranks, by layer',
                         share=1 / 4),
    'jacobian': Measure(_jacobians, lambda c: 200.0,
                        'norms and singular values of the Jacobian of each block and of the whole stack', share=1 / 64),
    'mean_jacobian': Measure(_heat_maps, lambda c: 10 * c.d_model / c.num_layers,
                             'token-averaged Jacobians of five layers (Figure 5)',
                             share=1 / 256, arrays=('mean_jacobian',)),
    'sublayer_drop': Measure(_without_baseline(removal.sublayer_drop), lambda c: c.num_layers + 4,
                             'loss without each attention and each MLP', share=1 / 4),
    'perturb': Measure(_perturbed, lambda c: 4 * c.num_layers + 10,
                       'loss with noise on each layer, with more and less of it, with neighbours swapped',
                       share=1 / 16, least=2),
    'block_drop': Measure(_without_baseline(removal.block_drop), _all_blocks,
                          'loss without each block of consecutive layers', share=1 / 16, least=2),
    'prune': Measure(_pruned, _all_blocks, 'greedy removal of one layer after another',
                     share=1 / 16, least=2, reads=lambda c: c.num_layers - 1),
}


def _of_task(loss: str, **score) -> Measure:
  """A measure of LOSS with the score of a task in place of the loss; its keys begin with 'task_'."""
  row = LOSS[loss]
  def run(config, params, batches, *, seed, score_fn):
    found = row.run(config, params, batches, seed=seed, score_fn=score_fn, **score)
    return {f'task_{key.removeprefix("layer_")}': value for key, value in found.items()}
  return dataclasses.replace(row, run=run, what=f'{row.what}; by the accuracy of --task', task=True)


MEASURES = LOSS | {
    'task_drop': _of_task('layer_drop'),
    'task_sublayer_drop': _of_task('sublayer_drop'),
    'task_block_drop': _of_task('block_drop'),
    'task_prune': _of_task('prune', lower_is_better=False),
}


def choose(names: Sequence[str], config: ModelConfig, task: bool = False) -> dict[str, Measure]:
  """The measures called so, in the table's order; for no names, and for 'all', every one that is not asked_only.

  Where there is a task and no name is of one of its measures, all of those are taken beside the others.

  Raises UserError for an unknown one, and for one that was asked for and that the model is too shallow for, that lacks
  a task, or that needs what is not installed.
  """
  named = [name for name in names if name != 'all']
  for name in named:
    if name not in MEASURES:
      raise UserError(f'there is no measure {name!r}.{nearest(name, [*MEASURES, "all"])}')
    if config.num_layers < MEASURES[name].least:
      raise UserError(f'{name} needs a model with {MEASURES[name].least} layers or more, this one has '
                      f'{config.num_layers}.')
    if MEASURES[name].task and not task:
      raise UserError(f'{name} needs a task: give --task=accuracy or --task=FILE.jsonl.')
    MEASURES[name].ready()
  fits = {name: m for name, m in MEASURES.items() if config.num_layers >= m.least and (task or not m.task)}
  every = len(named) < len(names) or not names
  all_of_task = every or not any(MEASURES[name].task for name in named)
  return {name: m for name, m in fits.items()
          if name in named or not m.asked_only and (all_of_task if m.task else every)}
