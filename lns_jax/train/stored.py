"""What a folder of checkpoints holds: which steps are finished and sound, and reading from them. Changes nothing.

The layout is that of `checkpoint`, which writes it.
"""

import logging as stdlib_logging
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from lns_jax import files
from lns_jax.errors import UserError
from lns_jax.models import by_layer
from lns_jax.train import manifest


def _worth_reading(record) -> bool:
  """Whether a log record is not one of Orbax's reports of progress or of errors, which it raises as well."""
  return record.levelno == stdlib_logging.WARNING or not record.pathname.startswith(os.path.dirname(ocp.__file__))


logging.get_absl_logger().addFilter(_worth_reading)  # concerns Orbax's records alone


def load_config(directory: epath.PathLike, step: int | None = None) -> tuple[int, dict] | None:
  """Step and config of the newest sound checkpoint in `directory`, or of `step`; None when there is none.

  Reads no array, changes nothing.

  Raises:
    UserError: every checkpoint, or the one asked for, is damaged; or the one asked for is absent.
  """
  chosen = _choose(directory, step, 'config')
  if chosen is None:
    return None
  path, me = absolute(directory) / str(chosen), jax.process_index()
  # Without the other processes, which may not ask.
  only_me = ocp.options.MultiprocessingOptions(
      primary_host=me, active_processes={me}, barrier_sync_key_prefix=f'process_{me}')
  handler = ocp.JsonCheckpointHandler(multiprocessing_options=only_me)
  with _reading(path), ocp.Checkpointer(handler, multiprocessing_options=only_me) as reader:
    return chosen, reader.restore(path / 'config', args=ocp.args.JsonRestore())


def can_go_on(directory: epath.PathLike, step: int) -> bool:
  """Whether the checkpoint of `step` holds an optimizer's state, without which no run goes on."""
  return (absolute(directory) / str(step) / 'opt_state').exists()


def load_params(directory: epath.PathLike, *, step: int | None = None, like=None, shardings=None):
  """Parameters of the newest sound checkpoint in `directory`, or of `step`. Changes nothing, reads only them.

  Args:
    like: tree of jax.ShapeDtypeStruct with sharding to restore to; None: as they were saved, numpy arrays whatever
      the devices that saved them.
    shardings: tree of shardings to restore what was saved to, each part by the devices that hold it.

  Raises:
    UserError: there is no sound checkpoint, or shape, type or name of a leaf differ from `like`.
  """
  chosen = _choose(directory, step, 'params')
  if chosen is None:
    raise UserError(f'{absolute(directory)} holds no checkpoint.')
  path = absolute(directory) / str(chosen)
  if shardings is not None:
    saved = _metadata(path, 'params')
    like = jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), saved, shardings)
  if like is not None:
    check_leaves(path, 'params', like)
    return read(path, params=ocp.args.StandardRestore(jax.tree.map(abstract, like)))['params']
  # The stored sharding names devices that need not exist here.
  to_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), _metadata(path, 'params'))
  return read(path, params=ocp.args.PyTreeRestore(restore_args=to_numpy))['params']


def absolute(directory: epath.PathLike) -> epath.Path:
  """A local folder by its whole path; one in a bucket as it is."""
  path = epath.Path(directory)
  return path if '://' in os.fspath(directory) else path.expanduser().absolute()


def steps(root: epath.Path) -> list[int]:
  """All steps that have a folder, finished or not, rising."""
  return sorted(int(p.name) for p in root.iterdir() if p.name.isdecimal()) if root.exists() else []


def written(root: epath.Path, step: int | None) -> list[int]:
  """Steps that are not being written or deleted, rising; only `step`, if given.

  Raises UserError when `step` is not among them.
  """
  found = [s for s in steps(root)
           if (root / str(s) / manifest.NAME).exists() or not (root / f'{s}.unfinished').exists()]
  if step is None:
    return found
  if step not in found:
    raise UserError(f'{root} holds no checkpoint of step {step}, only of: {", ".join(map(str, found)) or "none"}.')
  return [step]


def newest_sound(root, step, checksums, under='') -> tuple[int | None, dict[int, str]]:
  """The newest undamaged step (only `step` is tried, if given), and what is wrong with each one newer than it."""
  damaged = {}
  for s in reversed(written(root, step)):
    wrong = manifest.damage(root / str(s), checksums=checksums, under=under)
    if not wrong:
      return s, damaged
    damaged[s] = wrong
    logging.warning('Checkpoint %s is damaged: %s.', root / str(s), wrong)
  return None, damaged


def refuse_damaged(root, any_damaged: bool, damaged: dict[int, str]):
  """Raises UserError when there were damaged steps, with what is wrong with each, as far as this process knows."""
  if any_damaged:
    which = '; '.join(f'{s}: {wrong}' for s, wrong in damaged.items()) or 'the log of process 0 names it'
    raise UserError(f'no checkpoint in {root} is sound ({which}); another folder, or the damaged ones moved away, '
                    'would start afresh.')


def _choose(directory, step, under) -> int | None:
  root = absolute(directory)
  found, damaged = newest_sound(root, step, True, under)
  refuse_damaged(root, found is None and bool(damaged), damaged)
  return found


def read(path: epath.Path, **items) -> dict[str, Any]:
  """Items of a step, by Orbax's arguments for each. Raises UserError when one cannot be read."""
  with _reading(path), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
    return dict(reader.restore(path, args=ocp.args.Composite(**items)).items())


def _metadata(path: epath.Path, item: str):
  with _reading(path):
    return ocp.StandardCheckpointHandler().metadata(path / item).tree


def _reading(path: epath.Path):
  """What no size shows and no checksum was there to notice is left to Orbax, in its words."""
  return files.in_one_sentence(f'checkpoint {path} cannot be read', Exception,
                               '; with that folder moved away the step before it would be used')


def abstract(leaf) -> jax.ShapeDtypeStruct:
  """Shape, type and sharding of a leaf."""
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _leaves(tree) -> dict[str, str]:
  """'layers/7/attn/q' -> '(64, 64) float32'."""
  return {path: f'{tuple(leaf.shape)} {np.dtype(leaf.dtype)}' for path, leaf in by_layer.leaves(tree)}


def check_leaves(path: epath.Path, item: str, like):
  """Refuses `like` when a leaf is missing, extra, or of another shape or type: Orbax would cast types in silence."""
  saved, asked = _leaves(_metadata(path, item)), _leaves(like)
  for name in sorted(saved | asked):
    if saved.get(name) != asked.get(name):
      raise UserError(f'checkpoint {path} has {saved.get(name, "nothing")} at {item}/{name} where '
                      f'{asked.get(name, "nothing")} was asked for.')
