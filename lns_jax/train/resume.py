"""What a run folder holds, whether it fits the settings, and how a run goes on from it."""

import json
import pathlib

import jax
import numpy as np

from lns_jax import config as config_lib
from lns_jax import sharding
from lns_jax.config import RunConfig
from lns_jax.errors import UserError
from lns_jax.models import layout
from lns_jax.train import checkpoint
from lns_jax.train import step as step_lib
from lns_jax.train.run import Run, say

# Settings that a run may change when it goes on: they do not touch its numbers.
FREE = ('model.loop', 'model.remat', 'data.cache_dir', 'data.workers', 'data.read_threads', 'data.source',
        'data.data_dir', 'data.text_field', 'data.tokenizer', 'train.loss_chunk', 'train.log_every', 'train.layer_stats_every',
        'train.tensorboard', 'eval', 'checkpoint', 'mesh')


def open_workdir(workdir: str | pathlib.Path) -> pathlib.Path:
  """Creates the run folder. Raises UserError when it cannot be written."""
  path = pathlib.Path(workdir).expanduser().absolute()
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe = path / '.probe'
    probe.touch()
    probe.unlink()
  except OSError as e:
    raise UserError(f'{path} cannot be used as a run folder: {e.strerror}.') from None
  return path


def flat(values: dict, prefix: str = '') -> dict:
  found = {}
  for key, value in values.items():
    found |= flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {f'{prefix}{key}': value}
  return found


def differences(saved: dict, asked: dict) -> dict[str, tuple]:
  """{'model.scheme': (saved, asked)} for every setting that defines the run and differs."""
  saved, asked = flat(saved), flat(asked)
  free = lambda name: any(name == f or name.startswith(f + '.') for f in FREE)
  return {n: (saved.get(n), asked.get(n)) for n in sorted(saved.keys() | asked.keys())
          if saved.get(n) != asked.get(n) and not free(n)}


def check_config(workdir: pathlib.Path, config: RunConfig, corpus_hash: str):
  """Refuses to go on with a run whose defining settings or corpus differ, naming the first such field."""
  checkpoints, info = workdir / 'checkpoints', workdir / 'run_info.json'
  found = checkpoint.load_config(checkpoints) if checkpoints.exists() else None
  if found is None:
    return  # nothing was saved yet: starting anew loses nothing
  changed = differences(found[1], config_lib.to_dict(config))
  if changed:
    name, (old, new) = next(iter(changed.items()))
    more = f' ({len(changed) - 1} more differ: {", ".join(list(changed)[1:4])})' if len(changed) > 1 else ''
    raise UserError(f'{workdir} holds a run with {name} = {old!r}, but {new!r} was asked for{more}; '
                    f'use another --workdir, or set --config.{name}={old}.')
  old_hash = json.loads(info.read_text()).get('corpus_hash') if info.exists() else corpus_hash
  if old_hash != corpus_hash:
    raise UserError(f'{workdir} holds a run on a corpus with hash {old_hash[:12]}, the present one has '
                    f'{corpus_hash[:12]}; use another --workdir.')


def finished(workdir: pathlib.Path, steps: int) -> dict | None:
  """The result of a run that reached its last step, None of one that did not."""
  path = workdir / 'result.json'
  result = json.loads(path.read_text()) if path.exists() else {}
  return result if result.get('step') == steps else None


def restore_or_init(run: Run, saver: checkpoint.Checkpointer) -> tuple[step_lib.TrainState, dict]:
  """(state, {'step', 'tokens'}): from the newest sound checkpoint, else fresh."""
  abstract = run.canonical().abstract_state()
  restored = saver.restore(abstract.params, abstract.opt_state)
  if restored is None:
    return run.fresh_state(), {'step': 0, 'tokens': 0}
  params, opt_state = restored.params, restored.opt_state
  if run.config.model.loop == 'scan':
    to_native = jax.jit(lambda tree: layout.stack(tree, run.config.model),
                        out_shardings=(run.shardings.params, run.shardings.opt_state))
    params, opt_state = to_native((params, opt_state))
  step = jax.device_put(np.int32(restored.step), sharding.replicated(run.mesh))
  say(f'{run.workdir}: going on from step {restored.step} of {run.steps}')
  return step_lib.TrainState(params, opt_state, step), {k: restored.data[k] for k in ('step', 'tokens')}
