"""Surgery on a run's model: which layers go, what that costs, and the run folder of what is left."""

import math
import time
from collections.abc import Sequence

import jax
import numpy as np
import tqdm

from lns_jax import files, remote, runs, samples, sharding
from lns_jax.config import ModelConfig
from lns_jax.data import sample as sample_lib
from lns_jax.depth import removal
from lns_jax.errors import UserError
from lns_jax.interop import save as save_lib
from lns_jax.interop.load import load_run_config, load_shared
from lns_jax.models import transformer

TOKENS = 65_536  # of the sample that layers are chosen on: each is tried again and again


def prune(model, out, *, drop_layers: Sequence[int] = (), most_rise: float | None = None,
          tokens: int = TOKENS) -> dict:
  """Writes the run folder `out` with a run's newest model without some layers; the others keep their own index.

  Exactly one of drop_layers and most_rise says which layers go.

  Args:
    model: run folder.
    out: folder that does not exist yet.
    drop_layers: 1-based ids of the layers.
    most_rise: layers are removed one after another, always the one that costs least, as long as the loss on the sample
      rises by less than this share of the whole model's.
    tokens: size of the sample, drawn from the validation split, in predictions; of a model of images, in images; 0: the
      whole split.

  Returns:
    {'out', 'removed_layers' (in the order of removal), 'layer_ids' (that are left), 'before' and 'after': the run's own
    evaluation of the whole and of the pruned model, as `runs.evaluate` has it; 'rise' of the loss in nats,
    'relative_rise', 'step'; 'sample': {'tokens' (or images), 'relative_rise'} that the choice went by, None for given
    layers; 'seconds'}.

  Raises:
    UserError: before long work for ids that are not there, no layer left, or an `out` that cannot be made; and when no
      layer can go at `most_rise`. Nothing is written then.
  """
  start = time.perf_counter()
  if bool(drop_layers) == (most_rise is not None):
    raise UserError('give one of --drop_layers, the layers to remove, and --most_rise, what removing layers may cost.')
  if most_rise is not None and math.isnan(most_rise):
    raise UserError('--most_rise is not a number; 0.01 lets the loss rise by less than 1 %.')
  out, drop_layers, model = files.unused(out), list(dict.fromkeys(drop_layers)), remote.local(model)
  step, run = load_run_config(model)
  mesh = sharding.fitting(run)
  config, params = load_shared(model, mesh, step=step)
  sample = None
  if drop_layers:
    less = transformer.remove_layers(config, params, drop_layers)
    dataset = runs.open_dataset(model, run)
  else:
    removal.check_spare(config)
    dataset = runs.open_dataset(model, run)
    drop_layers, sample = _choose(config, params, dataset, mesh, most_rise, tokens)
    less = transformer.remove_layers(config, params, drop_layers)
  before, after = (runs.score(run, c, p, dataset, max_tokens=run.eval.max_tokens, mesh=mesh)
                   for c, p in ((config, params), less))
  after['params'] = sum(x.size for x in jax.tree.leaves(less[1]))
  save_lib.save(*less, out, like=model, step=step, result=after | {'step': step})
  shown = lambda found: {k: found[k] for k in runs.KEYS if k in found}
  return {'out': str(out), 'removed_layers': drop_layers, 'layer_ids': list(less[0].layer_ids),
          'before': shown(before), 'after': shown(after), 'rise': after['loss'] - before['loss'],
          'relative_rise': after['loss'] / before['loss'] - 1, 'step': step, 'sample': sample,
          'seconds': time.perf_counter() - start}


def _choose(config: ModelConfig, params, dataset, mesh, most_rise: float, tokens: int) -> tuple[list[int], dict]:
  """(ids of the layers that may go, in the order of removal; what prune's 'sample' says)."""
  rows = sample_lib.drawn(dataset, 'validation', tokens or math.inf)
  batches = samples.Batches(rows, mesh)
  with sharding.use(mesh), tqdm.tqdm(total=(config.num_layers - 1) * len(batches), desc='choosing', unit='batch',
                                     mininterval=0.5, dynamic_ncols=True, disable=jax.process_index() != 0) as bar:
    batches.tick = bar.update
    found = removal.prune(config, params, batches, stop_at=most_rise,
                          done=lambda ids: bar.set_postfix_str(f'without {", ".join(map(str, ids))}'))
  rises = found.rise.value / found.baseline.value
  n = int(np.cumprod(rises < most_rise).sum())
  if not n:
    raise UserError(f'no layer can go at less than {most_rise:.3g} of the loss: the cheapest, {found.order[0]}, costs '
                    f'{rises[0]:.3g} of it.')
  return list(found.order[:n]), {transformer.family(config).UNIT: int(found.baseline.tokens),
                                 'relative_rise': float(rises[n - 1])}
