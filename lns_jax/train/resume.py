"""What a run folder holds, whether it fits the settings, and how a run goes on from it."""

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import time

import jax
import numpy as np

from lns_jax import config as config_lib
from lns_jax import distributed, files, remote, sharding
from lns_jax.config import RunConfig
from lns_jax.distributed import say
from lns_jax.errors import UserError
from lns_jax.train import checkpoint, manifest, stored
from lns_jax.train import step as step_lib
from lns_jax.train.run import Run

# Settings that may differ between the processes of a run.
OF_A_HOST = ('data.source', 'data.data_dir', 'data.cache_dir', 'data.tokenizer', 'data.workers', 'data.read_threads')
# Settings that a run may change when it goes on. Those from the mesh to accumulation change no number, or only its
# rounding (Admin's start, which is drawn from a part of a batch, is behind a run that goes on); where the text comes
# from is free because the hash of the rows is checked instead.
FREE = ('eval', 'checkpoint', 'train.log_every', 'train.layer_stats_every', 'train.tensorboard',
        'mesh', 'profile', 'model.loop', 'model.remat', 'model.attention', 'model.microbatches', 'train.loss_chunk',
        'train.accumulation', 'data.text_field', *OF_A_HOST)


def open_workdir(workdir: str | pathlib.Path, flag: str = '--workdir', bucket: bool = False) -> pathlib.Path:
  """Creates the folder that `flag` names, with `bucket` also the local one of a run in a bucket, see `lns_jax.remote`.

  Raises UserError when it cannot be written or is not where it may be.
  """
  if not str(workdir):
    raise UserError(f'{flag} must be given: it is empty.')
  if remote.is_url(workdir) and bucket:
    kind = 'runs' if jax.process_index() == 0 else f'runs-of-process-{jax.process_index()}'  # may be one machine
    path = remote.folder(workdir, kind)
    say(f'{workdir}: the checkpoints are there, the other files in {path}, copied there at every save and evaluation')
    return path
  if remote.is_url(workdir):
    raise UserError(f'{workdir} is not a local folder, which {flag} must be; copy it there when all is done.')
  path = files.absolute(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f'.probe-{platform.node()}-{os.getpid()}'
    probe.touch()
    probe.unlink()
  except OSError as e:
    raise UserError(f'{path} cannot be used as {flag}: {e.strerror}.') from None
  return path


@contextlib.contextmanager
def alone(workdir: pathlib.Path, flag: str = '--workdir'):
  """Holds the folder that `flag` names for this process. Raises UserError when another one does, or none can."""
  try:
    opened = open(workdir / '.lock', 'w')
  except OSError as e:
    raise UserError(f'{workdir / ".lock"} cannot be written: {e.strerror}; {flag} needs that file.') from None
  with opened as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise UserError(f'another process is at work in {workdir}; wait for it, or use another {flag}.') from None
    yield


@contextlib.contextmanager
def held(workdir: pathlib.Path):
  """The folder of a run, held by process 0 for all. Raises UserError as `alone`, and where they do not share it."""
  with contextlib.ExitStack() as stack:
    def hold() -> str:
      stack.enter_context(alone(workdir))
      if jax.process_count() == 1 or remote.is_mirror(workdir):
        return ''  # the folder itself, which every host has
      for left in workdir.glob('.shared-*'):
        left.unlink(missing_ok=True)
      mark = workdir / f'.shared-{time.time_ns()}'
      mark.touch()
      stack.callback(mark.unlink, missing_ok=True)
      return mark.name
    mark = workdir / distributed.from_first(hold)
    until = time.monotonic() + 10  # a network disk may show it late
    while not mark.exists():
      if time.monotonic() > until:
        raise UserError(f'process {jax.process_index()} does not see what process 0 writes in {workdir}; --workdir '
                        'must be a folder that all hosts share.')
      time.sleep(0.2)
    yield


def flat(values: dict, prefix: str = '') -> dict:
  found = {}
  for key, value in values.items():
    found |= flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {f'{prefix}{key}': value}
  return found


def check_agreed(config: RunConfig):
  """Raises UserError where processes were started with other settings than process 0, but for where a host has its
  data: they would wait for each other forever, or each compute another part of another run."""
  mine = config_lib.to_dict(config)
  first = distributed.from_first(lambda: mine)
  for name, (theirs, own) in differences(first, mine, OF_A_HOST).items():
    raise UserError(f'process {jax.process_index()} was started with {name} = {own!r} and process 0 with {theirs!r}; '
                    'start all with the same command.')


def is_free(name: str, free: tuple[str, ...] = FREE) -> bool:
  """Whether a setting may change when a run goes on."""
  return any(name == f or name.startswith(f + '.') for f in free)


def with_defaults(saved: dict) -> dict:
  """Saved settings with those that came later: what a run from before them has is their default."""
  with contextlib.suppress(UserError):  # not even settings any more: compared as they are
    saved = config_lib.to_dict(config_lib.from_dict(RunConfig, saved))
  return saved


def differences(saved: dict, asked: dict, free: tuple[str, ...] = FREE) -> dict[str, tuple]:
  """{'model.scheme': (saved, asked)} for every setting that defines the run, none of `free`, and differs."""
  saved, asked = flat(with_defaults(saved)), flat(asked)
  return {n: (saved.get(n), asked.get(n)) for n in sorted(saved.keys() | asked.keys())
          if saved.get(n) != asked.get(n) and not is_free(n, free)}


def check_config(workdir: pathlib.Path, config: RunConfig):
  """Refuses to go on with a run whose defining settings differ, naming the first such field; or with no run at all."""
  checkpoints = remote.checkpoints(workdir)
  found = stored.load_config(checkpoints) if checkpoints.exists() else None
  if found is None:
    return  # nothing was saved yet: starting anew loses nothing
  if not stored.can_go_on(checkpoints, found[0]):
    raise UserError(f'{workdir} holds a model without the state of an optimizer, not a run that could go on; '
                    f'--config.train.init_from={workdir} with another --workdir starts a run from it.')
  changed = differences(found[1], config_lib.to_dict(config))
  if changed:
    name, (old, new) = next(iter(changed.items()))
    more = f' ({len(changed) - 1} more differ: {", ".join(list(changed)[1:4])})' if len(changed) > 1 else ''
    raise UserError(f'{workdir} holds a run with {name} = {old!r}, but {new!r} was asked for{more}; '
                    f'use another --workdir, or set --config.{name}={old}.')


def finished(run: Run, saver: checkpoint.Checkpointer) -> dict | None:
  """The result of a run that reached its last step with just these settings and rows, None of any other."""
  path, result = run.workdir / 'result.json', {}
  last = remote.checkpoints(run.workdir) / str(run.steps)
  if saver.latest() != run.steps or manifest.damage(last, checksums=run.config.checkpoint.checksums):
    return None
  with contextlib.suppress(OSError, ValueError):  # missing or damaged: evaluated again
    result = json.loads(path.read_text())
  told = {name: result.pop(name, None) for name in identity(run)}
  told['config'] = with_defaults(told['config'] or {})
  return result if told == identity(run) else None


def identity(run: Run) -> dict:
  """What result.json says of the run that it is the result of."""
  return {'config': config_lib.to_dict(run.config), 'corpus_hash': run.dataset.hash}


def restore_or_init(run: Run, saver: checkpoint.Checkpointer) -> tuple[step_lib.TrainState, dict]:
  """(state, {'step', 'tokens'}): from the newest sound checkpoint, else fresh."""
  abstract = run.canonical().abstract_state()
  restored = saver.restore(abstract.params, abstract.opt_state)
  if restored is None:
    return run.fresh_state(), {'step': 0, 'tokens': 0}
  saved_hash = restored.data['corpus_hash']
  if saved_hash != run.dataset.hash:
    raise UserError(f'{run.workdir} holds a run on a corpus with hash {saved_hash[:12]}, the present one has '
                    f'{run.dataset.hash[:12]}; use another --workdir.')
  params, opt_state = run.to_native((restored.params, restored.opt_state))
  step = jax.device_put(np.int32(restored.step), sharding.replicated(run.mesh))
  say(f'{run.workdir}: going on from step {restored.step} of {run.steps}')
  return step_lib.TrainState(params, opt_state, step), {k: restored.data[k] for k in ('step', 'tokens')}
