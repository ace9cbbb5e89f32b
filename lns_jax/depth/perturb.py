"""Perturbation of single layers: noise on what a layer adds, more or less of it, neighbours swapped.

The paper's abstract names it beside pruning: a layer of the curse of depth can be "pruned or perturbed" unnoticed.
"""

import math

import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import interventions
from lns_jax.depth.estimate import Estimate
from lns_jax.depth.interventions import Plan, ScoreFn

NOISES = (0.1, 0.3, 1.0)
SCALES = (0.0, 0.5, 1.5, 2.0)


def perturb(config: ModelConfig, params, batches, *, noises=NOISES, scales=SCALES, score_fn: ScoreFn | None = None,
            seed: int = 0) -> dict[str, Estimate]:
  """Change of the loss when one layer is perturbed, all others as they are; one compiled program for everything.

  What a layer adds is the stream that leaves it less the stream that enters it, whatever its norms.

  Args:
    noises: norms of Gaussian noise, relative to what the layer adds, token by token. One draw a token, from `seed`.
    scales: factors on what the layer adds; 0 is the layer's removal.

  Returns:
    'baseline' []: the loss; and, as changes of it, 'noise' [len(noises), L], 'scale' [len(scales), L], and 'swap'
    [L - 1]: layers l and l + 1 in the other order, each with its own index's factors. What is empty is left out: 'swap'
    of a single layer.
  """
  L = config.num_layers
  at = np.arange(L)
  plans = [*(Plan.of('noise', at, at + 1, size) for size in noises),
           *(Plan.of('scale', at, at + 1, factor) for factor in scales), Plan.of('swap', at[:-1], at[:-1] + 2)]
  plan = sum(plans[1:], plans[0])
  baseline, change = interventions.run(config, params, batches, plan, score_fn=score_fn, seed=seed)
  found, first = {'baseline': baseline.estimate()}, 0
  for name, shape in {'noise': (len(noises), L), 'scale': (len(scales), L), 'swap': (L - 1,)}.items():
    part = slice(first, first + math.prod(shape))
    if math.prod(shape):
      found[name] = change.estimate(lambda each, part=part, shape=shape: each[:, part].reshape(-1, *shape))
    first = part.stop
  return found
