"""Checkpoints of a run: saved by Orbax in the background, listed in a manifest, checked before they are restored.

A checkpoint folder holds one folder a step, named by the step, with the items `params`, `opt_state`, `data` and
`config` and a `manifest.json`. Beside them may stand `<step>.unfinished`, the marker of a step that is being
written or deleted, and `<step>.damaged`, a step that was set aside.

A step counts from the moment its manifest is there: older steps are deleted only after that, so that a kill at any
moment leaves a whole one. A step without manifest and with a marker was interrupted and is removed at the next
start; one without manifest and without marker is damaged.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from lns_jax import files
from lns_jax.config import CheckpointConfig
from lns_jax.errors import UserError
from lns_jax.train import manifest, stored

_ARRAYS = ('params', 'opt_state')
_TMP = ocp.path.step.TMP_DIR_SUFFIX


@dataclasses.dataclass(frozen=True)
class Restored:
  """What a checkpoint held: arrays as they were asked for, data position and config as plain JSON values."""

  step: int
  params: Any
  opt_state: Any
  data: dict
  config: dict


class Unwritten(UserError):
  """A checkpoint could not be written; `reason` says why, in the operating system's words."""

  def __init__(self, path, reason: str):
    super().__init__(f'checkpoint {path} could not be written: {reason}; earlier checkpoints are intact.')
    self.reason = reason


class Checkpointer:
  """Saves and restores the state of one run. A context manager: leaving it waits for the last save.

  With several processes every one makes the same calls; the first alone checks, marks and deletes.
  """

  def __init__(self, directory: epath.PathLike, settings: CheckpointConfig):
    """Opens or creates `directory`, and removes what interrupted saves left there.

    Raises:
      UserError: `directory` cannot be written.
    """
    self._root = stored.absolute(directory)
    # What is in a bucket has the bucket's own checksums, and ours would read all of it back.
    self._settings = dataclasses.replace(settings, checksums=settings.checksums and '://' not in str(self._root))
    self._primary = jax.process_index() == 0
    self._probe()
    if self._primary:
      self._remove_unfinished()
    _wait_for_all()  # nobody reads or writes before the folder is clean
    self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    self._worker = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
    self._pending: concurrent.futures.Future | None = None

  def __enter__(self):
    return self

  def __exit__(self, kind, error, trace):
    try:
      self.close()
    except Exception as late:
      if error is None:
        raise
      logging.error('%s', late)  # the first error is the one to read

  def close(self):
    """Waits until the last save is on disk. Raises UserError when it could not be written."""
    try:
      self.wait()
    finally:
      self._worker.shutdown()
      with contextlib.suppress(Exception):  # an error of the last save was raised above
        self._orbax.close()

  def wait(self):
    """Waits for the save that is under way. Raises UserError when it could not be written."""
    if self._pending is not None:
      concurrent.futures.wait([self._pending])
      pending, self._pending = self._pending, None  # only now: an interrupted wait must not lose the error
      pending.result()

  def check(self):
    """Raises the error of a background save as soon as there is one; never waits. Cheap enough for every step."""
    if self._pending is not None and self._pending.done():
      self.wait()

  def steps(self) -> list[int]:
    """Finished steps, rising. Says nothing of damage: `restore` does."""
    return [s for s in stored.steps(self._root) if (self._root / str(s) / manifest.NAME).exists()]

  def latest(self) -> int | None:
    """The newest finished step."""
    return max(self.steps(), default=None)

  def save(self, step: int, *, params, opt_state, data: dict, config: dict):
    """Starts to save a step and returns as soon as its arrays are copied: they may be donated or changed then.

    Waits first for the save before it, if that is still under way.

    Args:
      step: updates done; larger than every step in the folder.
      params, opt_state: trees of arrays (nested dicts with str keys, tuples, NamedTuples). opt_state None: a model
        that no run goes on from, see `stored.can_go_on`.
      data: position in the data. config: the resolved settings. Both plain JSON values.

    Raises:
      UserError: this step or the save before it could not be written; earlier checkpoints are intact. Or the
        folder holds this step or a later one.
      ValueError: `data` or `config` would not survive JSON.
    """
    self.wait()
    for name, value in (('data', data), ('config', config)):
      if json.loads(json.dumps(value, allow_nan=False)) != value:
        raise ValueError(f'{name} of a checkpoint must be plain JSON values, got {value!r}.')
    newest = max(stored.steps(self._root), default=-1)
    if step <= newest:
      raise UserError(f'checkpoint {self._root / str(newest)} is there already, so that step {step} is not saved '
                      'over it; another folder, or that one moved away, would do.')
    items = {n: ocp.args.StandardSave(t) for n, t in zip(_ARRAYS, (params, opt_state)) if t is not None}
    items |= {'data': ocp.args.JsonSave(data), 'config': ocp.args.JsonSave(config)}
    with self._explained(step):
      if self._primary:
        self._marker(step).touch()
      self._orbax.save(self._root / str(step), args=ocp.args.Composite(**items))
    self._pending = self._worker.submit(self._finish, step)

  def restore(self, like_params, like_opt_state, *, step: int | None = None) -> Restored | None:
    """The newest sound step, or the one asked for; None when the folder holds none.

    A damaged step newer than it is set aside as `<step>.damaged`, with a warning that names the file.

    Args:
      like_params, like_opt_state: trees of jax.ShapeDtypeStruct (or arrays) with the sharding to restore to, on
        any number of devices. The results have the same tree types.

    Raises:
      UserError: every step, or the one asked for, is damaged; or shape, type or name of a leaf differ.
    """
    self.wait()
    stored.written(self._root, step)  # refuses an absent step on every process alike
    found, damaged = None, {}
    if self._primary:
      found, damaged = stored.newest_sound(self._root, step, self._settings.checksums)
      for bad in damaged if found is not None else ():
        self._set_aside(bad)
    chosen = _from_primary(-1 if found is None else found)
    if chosen < 0:
      stored.refuse_damaged(self._root, _from_primary(int(bool(damaged))), damaged)
      return None
    path, like = self._root / str(chosen), dict(zip(_ARRAYS, (like_params, like_opt_state)))
    for name in _ARRAYS:
      stored.check_leaves(path, name, like[name])
    items = {n: ocp.args.StandardRestore(jax.tree.map(stored.abstract, t)) for n, t in like.items()}
    return Restored(chosen, **stored.read(path, **items, data=ocp.args.JsonRestore(), config=ocp.args.JsonRestore()))

  def _probe(self):
    probe = self._root / f'.probe-{jax.process_index()}-{os.getpid()}'
    with files.in_one_sentence(f'checkpoint folder {self._root} cannot be written', OSError):
      self._root.mkdir(parents=True, exist_ok=True)
      probe.touch()
      probe.unlink()

  def _marker(self, step: int) -> epath.Path:
    return self._root / f'{step}.unfinished'

  def _remove_unfinished(self):
    for marker in self._root.glob('*.unfinished'):
      path = self._root / marker.stem
      with files.in_one_sentence(f'what an interrupted save or deletion left of {path} could not be removed', OSError):
        if not (path / manifest.NAME).exists():
          logging.warning('Checkpoint %s was interrupted and is removed.', path)
          self._discard(int(marker.stem))
        marker.unlink()

  def _discard(self, step: int):
    for path in (self._root / str(step), *self._root.glob(f'{step}{_TMP}*')):
      if path.exists():
        path.rmtree()

  def _finish(self, step: int):
    """Runs in the worker: waits for Orbax's commit, then lists the step, then deletes what is too old."""
    with self._explained(step):
      self._orbax.wait_until_finished()
      if self._primary:
        manifest.write(self._root / str(step), checksums=self._settings.checksums)
        self._marker(step).unlink()
    if self._primary:
      self._delete_old()

  def _delete_old(self):
    steps, every = self.steps(), self._settings.keep_every
    for step in steps[:-self._settings.keep]:
      if every and step % every == 0:
        continue
      path = self._root / str(step)
      with files.in_one_sentence(f'old checkpoint {path} could not be deleted', OSError, '; newer ones are intact'):
        self._marker(step).touch()  # from here on the step is taken for unfinished, as soon as its manifest is gone
        (path / manifest.NAME).unlink()
        self._discard(step)
        self._marker(step).unlink()

  @contextlib.contextmanager
  def _explained(self, step: int):
    """Turns a failure to write `step` into one sentence, and gives back the room its parts took."""
    try:
      yield
    except Exception as e:
      if self._primary:
        with contextlib.suppress(OSError):
          self._discard(step)  # the marker stays: other threads of Orbax may still write, the next start removes that
      raise Unwritten(self._root / str(step), files.cause(e)) from e

  def _set_aside(self, step: int):
    name = f'{step}.damaged'
    tries = (self._root / (f'{name}-{n}' if n else name) for n in range(10**6))
    target = next(t for t in tries if not t.exists())
    with files.in_one_sentence(f'damaged checkpoint {self._root / str(step)} could not be set aside', OSError):
      (self._root / str(step)).rename(target)
    logging.warning('Checkpoint %s is set aside as %s.', self._root / str(step), target.name)


def _wait_for_all():
  """Returns when every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices('lns_jax.train.checkpoint')


def _from_primary(value: int) -> int:
  """Process 0's value, on every process."""
  return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.array(value)))
