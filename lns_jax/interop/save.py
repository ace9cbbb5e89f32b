"""Writing a model as a run folder, which every command opens like one that training left."""

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Callable

from lns_jax import config as config_lib
from lns_jax import files
from lns_jax.errors import UserError
from lns_jax.interop import names
from lns_jax.interop.load import load_run_config
from lns_jax.models import by_layer, layout
from lns_jax.train import checkpoint, run_info

# Left beside the weights, so that training on from them is one flag.
CONFIG = '''"""The settings of this model and its weights as the start: pretrain.py --config=THIS_FILE --workdir=NEW_FOLDER"""

import pathlib

from lns_jax import presets


def get_config():
  return presets.from_run(pathlib.Path(__file__).parent)
'''


def save(config: config_lib.ModelConfig, params, out, *, like, step: int | None = None,
         result: dict | None = None) -> pathlib.Path:
  """Writes a model that came from a run, such as that run's without some layers, as a run folder of its own.

  It holds the parameters without an optimizer's state, the tokenizer, and the run's settings with this model in them;
  run_info.json says under 'origin' which run and step that was and which of its layers are gone.

  Args:
    config, params: the model, in either layout.
    out: folder that does not exist yet; there whole or not at all.
    like: the run folder that the model came from.
    step: of the checkpoint that it came from, which factors that grow with updates go by; the newest sound one by
      default.
    result: of an evaluation of this model, which becomes result.json: without one it is not compared with runs.

  Returns:
    The absolute path of the folder.

  Raises:
    UserError: `out` exists or cannot be written, `like` is no run folder, or the parameters are not those of `config`.
  """
  out = files.unused(out)
  step, run = load_run_config(like, step)
  model = dataclasses.replace(config, ramp_step=run.model.ramp_step)  # `load` takes it from the step
  canonical = layout.unstack(params)
  _check_shapes(model, canonical)
  like = files.absolute(like)
  origin = {'path': str(like), 'step': step,
            'removed_layers': sorted(set(run.model.layer_ids) - set(model.layer_ids))}
  tokenizer = like / 'tokenizer'
  return write(out, dataclasses.replace(run, model=model), canonical, step=step, origin=origin, result=result,
               corpus_hash=run_info.read(like)['corpus_hash'],
               tokenizer=functools.partial(shutil.copytree, tokenizer) if tokenizer.is_dir() else None)


def write(out: pathlib.Path, run: config_lib.RunConfig, canonical, *, step: int, origin: dict, corpus_hash: str | None,
          tokenizer: Callable[[pathlib.Path], object] | None, result: dict | None = None) -> pathlib.Path:
  """Writes a run folder that no training has left: whole or not at all.

  Args:
    out: as `files.unused` gives it.
    run, canonical: settings, and parameters with one entry a layer.
    origin: where the model is from, for run_info.json.
    corpus_hash: of the text that the model is measured on; None: there is none.
    tokenizer: writes the tokenizer into a folder that is not there yet; None: there is none.
    result: as of `save`.
  """
  values = config_lib.to_dict(run)
  try:
    with files.whole_folder(out) as folder:
      files.write_json(folder / 'run_info.json', run_info.collect(values, corpus_hash) | {'origin': origin})
      files.write_text(folder / 'config.py', CONFIG)
      if result is not None:
        files.write_json(folder / 'result.json',
                         files.finite(result) | {'config': values, 'corpus_hash': corpus_hash})
      if tokenizer is not None:
        tokenizer(folder / 'tokenizer')
      with checkpoint.Checkpointer(folder / 'checkpoints', run.checkpoint) as saver:
        saver.save(step, params=canonical, opt_state=None, data={'step': step, 'corpus_hash': corpus_hash},
                   config=values)
  except checkpoint.Unwritten as e:
    raise _unwritten(out, e.reason) from None
  except OSError as e:
    raise _unwritten(out, files.cause(e)) from None
  return out


def _unwritten(out: pathlib.Path, reason: str) -> UserError:
  return UserError(f'{out} could not be written: {reason}; nothing is left of it.')


def _check_shapes(config: config_lib.ModelConfig, canonical):
  """Refuses parameters that a model of these settings does not have."""
  wanted, given = ({name: x.shape for name, x in leaves.items()}
                   for leaves in (names.shapes(config), dict(by_layer.leaves(canonical))))
  for name in sorted(wanted | given):
    if wanted.get(name) != given.get(name):
      raise UserError(f'the parameters have {given.get(name, "nothing")} at {name} where the model has '
                      f'{wanted.get(name, "nothing")}.')
