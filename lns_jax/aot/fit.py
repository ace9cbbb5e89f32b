"""What to change in a run that does not fit into a chip's memory: the nearest setting that does."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from lns_jax import config as config_lib
from lns_jax.config import RunConfig
from lns_jax.distributed import say
from lns_jax.errors import UserError

REMAT = ('none', 'names', 'full')  # from the fastest to the smallest


def steps(config: RunConfig, possible: Callable[[dict], bool]) -> Iterator[dict[str, dict[str, Any]]]:
  """Ever smaller settings, each with all that the ones before it change: remat, then fsdp, then accumulation.

  Recomputing costs up to a third more time, fsdp a gather of each layer's weights, accumulation nothing but smaller
  products; the first keeps the mesh, all three the numbers of the run (but `paper_loss`, which follows the rows of an
  evaluation's batch).

  possible: whether a run can have changed settings; fsdp is left out where it does not divide.
  """
  changes = {}
  if config.model.remat in REMAT:
    for remat in REMAT[REMAT.index(config.model.remat) + 1:]:
      changes = {'model': {'remat': remat}}
      yield changes
  mesh = config.mesh
  outer = mesh.slices if mesh.across == 'data' and mesh.slices else 1  # whose slow network gathers no weights
  if mesh.data != outer:  # all rows' devices share the parameters too
    shared = -1 if -1 in (mesh.data, mesh.fsdp) else mesh.data * mesh.fsdp // outer
    sharded = changes | {'mesh': {'data': outer, 'fsdp': shared}}
    if possible(sharded):
      changes = sharded
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
    smallest: a config -> bytes that its state takes on a device: where those alone are more than `limit` nothing is
      compiled. Raises UserError for what is not possible on this mesh, or of this batch.
  """
  def least(change: dict) -> float:
    try:
      return smallest(config_lib.changed(config, change))
    except UserError:
      return math.inf
  for change in steps(config, lambda change: least(change) < math.inf):
    flags = [f'--config.{group}.{name}={value}' for group, values in change.items() for name, value in values.items()]
    if least(change) > limit:
      continue
    say(f'trying {" ".join(flags)}')
    with contextlib.suppress(UserError):  # the compiler fails
      if compile(config_lib.changed(config, change))['fits']:
        return flags
  return None
