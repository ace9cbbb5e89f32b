"""What to change in a run that does not fit into a chip's memory: the nearest setting that does."""

from collections.abc import Callable, Iterator
from typing import Any

from lns_jax import config as config_lib
from lns_jax.config import RunConfig
from lns_jax.distributed import say
from lns_jax.errors import UserError

REMAT = ('none', 'names', 'full')  # from the fastest to the smallest


def steps(config: RunConfig) -> Iterator[dict[str, dict[str, Any]]]:
  """Ever smaller settings, each with all that the ones before it change: remat, then fsdp, then accumulation.

  Recomputing costs up to a third more time, fsdp a gather of each layer's weights, accumulation nothing but smaller
  products; the first keeps the mesh, all three the numbers of the run.
  """
  changes = {}
  if config.model.remat in REMAT:
    for remat in REMAT[REMAT.index(config.model.remat) + 1:]:
      changes = {'model': {'remat': remat}}
      yield changes
  if config.mesh.data != 1:  # all rows' devices share the parameters too
    changes = changes | {'mesh': {'data': 1, 'fsdp': -1}}
    yield changes
  parts = config.train.accumulation
  while parts < config.train.batch_size:
    parts *= 2
    rows = max((config.eval.batch_size or config.train.batch_size) // parts, 1)  # an evaluation's fit as well then
    yield changes | {'train': {'accumulation': parts}, 'eval': {'batch_size': rows}}


def nearest(config: RunConfig, compile: Callable[[RunConfig], dict],
            smallest: Callable[[RunConfig], int], limit: float) -> list[str] | None:
  """The flags to add that make the run fit, the first of `steps` that does, compiled to be sure; None where none does.

  Args:
    compile: a config -> {'fits', ...}.
    smallest: a config -> bytes of its state on a device: where those alone are more than `limit` nothing is compiled.
  """
  for change in steps(config):
    flags = [f'--config.{group}.{name}={value}' for group, values in change.items() for name, value in values.items()]
    try:
      changed = config_lib.changed(config, change)
      if smallest(changed) > limit:
        continue
      say(f'trying {" ".join(flags)}')
      if compile(changed)['fits']:
        return flags
    except UserError:  # not possible on this mesh, or of this batch
      continue
  return None
