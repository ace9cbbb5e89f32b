"""Opening a trained model by its path, whatever made it."""

import dataclasses

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath

from lns_jax import config as config_lib
from lns_jax import files, remote
from lns_jax import sharding as sharding_lib
from lns_jax.data import tokenizers
from lns_jax.errors import UserError, nearest
from lns_jax.interop import fold, hf, weights
from lns_jax.interop.fields import RECORD
from lns_jax.layers import fp8, param, schemes
from lns_jax.models import layout
from lns_jax.train import stored

# Types that a model can be run in: the model.precision with parameters and compute of that type.
PRECISIONS = {'float32': 'float32', 'bfloat16': 'paper_bf16', 'float64': 'float64'}


def load_run_config(workdir, step: int | None = None) -> tuple[int, config_lib.RunConfig]:
  """(step, resolved settings) of the run in `workdir`, from its newest sound checkpoint or the one at `step`."""
  found = stored.load_config(_checkpoints(workdir), step)
  if found is None:
    raise UserError(f'{workdir} holds no finished checkpoint yet.')
  return found[0], config_lib.from_dict(config_lib.RunConfig, found[1])


def _checkpoints(workdir) -> epath.Path:
  where = files.absolute(remote.local(workdir))
  if not is_run(where):
    others = (where / 'config.json').exists() or where.suffix == '.gguf'
    raise UserError(f'{workdir} is not a run folder: it has no checkpoints; ' + (
        f'import_hf.py --model={workdir} --workdir=FOLDER makes one of it.' if others else
        'give the --workdir of a run.'))
  return remote.checkpoints(where)


def is_run(path) -> bool:
  """Whether `path` is a run folder of this package."""
  return remote.checkpoints(files.absolute(remote.local(path))).is_dir()


def load(path, *, step: int | None = None, dtype=None, sharding=None, scheme: str | None = None):
  """Opens a model.

  Args:
    path: run folder of this package, also one in a bucket (gs://), Hugging Face folder, or .gguf file.
    step: checkpoint of a run to open; the newest sound one by default.
    dtype: type that the parameters are cast to, learned factors apart, which stay float32; as saved by default.
    sharding: where they are placed: one for all, a tree, or a function that gives either of the ModelConfig, as
      `lns_jax.sharding.share`, by which no device ever holds the whole of a run; the default device by default.
    scheme: norm placement of weights that do not say theirs (those of the paper's code call themselves plain Llama);
      a run folder does, so that another one is refused.

  Returns:
    (ModelConfig, parameters in the layout of its loop, tokenizer; None of a model of images, or where there is none).

  Raises:
    UserError: there is no model at `path`, it is damaged or not understood, or its scheme is not `scheme`.
  """
  path = remote.local(path)
  if is_run(path):
    return _load_run(path, step, dtype, sharding, scheme)
  if step is not None:
    raise UserError(f'{path} is not a run folder, so that it has no step {step}.')
  opened = _open(path)
  record = opened.config.get(RECORD)
  if record and not isinstance(record, dict):
    raise UserError(f'{path}: the field {RECORD} of its config is damaged; without it, the model is a plain one with '
                    'the same function.')
  if record and scheme not in (None, record.get('scheme')):
    raise UserError(f"{path} was exported from a model of scheme {record.get('scheme')!r}, not {scheme!r}.")
  config, params = hf.read(opened, scheme=None if record else scheme, dtype=dtype, sharding=sharding)
  if record:
    config, params = fold.unfold(config, params, record)
    if callable(sharding):
      params = jax.device_put(params, sharding(config))
  tokenizer = opened.tokenizer()
  if tokenizer is not None and config.family != 'vit':
    tokenizers.check_vocab(tokenizer, config.vocab_size)
  return config, params, tokenizer


def load_shared(path, mesh: jax.sharding.Mesh, *, step: int | None = None):
  """(ModelConfig, parameters) of a run folder, split over a mesh as in training; each device reads its own part."""
  step, config = _run_model(path, step)
  return config, _shared_params(path, step, config, None, lambda config: sharding_lib.params(mesh, config))


def _shared_params(path, step: int, config: config_lib.ModelConfig, dtype, sharding):
  """Parameters of a run folder where `sharding` lays those of a config."""
  canonical = sharding(dataclasses.replace(config, loop='unrolled'))
  params = _cast(stored.load_params(_checkpoints(path), step=step, shardings=canonical), dtype)
  if config.loop != 'scan':
    return params
  return jax.jit(lambda tree: layout.stack(tree, config), out_shardings=sharding(config))(params)


def _cast(params, dtype):
  if dtype is None:
    return params
  return jax.tree_util.tree_map_with_path(
      lambda path, x: x if path[-1].key in schemes.LEARNED else jnp.asarray(x, dtype), params)


def _computable(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """The model with plain products in place of 8-bit ones where those are not to be had, which a warning says."""
  if config.matmul == 'fp8':
    try:
      fp8.check(jax.devices()[0])
    except UserError as e:
      logging.warning('%s The model computes so here.', e)
      return dataclasses.replace(config, matmul='plain')
  return config


def load_in(dtype: str, path, *, step: int | None = None, scheme: str | None = None, sharding=None):
  """As `load`, with parameters and compute of a type; '': the model's own.

  Raises UserError besides for a type that is not known, or that this machine cannot compute in, before reading.
  """
  if not dtype:
    return load(path, step=step, scheme=scheme, sharding=sharding)
  if dtype not in PRECISIONS:
    raise UserError(f'dtype = {dtype!r} is not known.{nearest(dtype, PRECISIONS)}')
  param.dtypes(config_lib.ModelConfig(precision=PRECISIONS[dtype]))
  config, params, tokenizer = load(path, step=step, dtype=dtype, scheme=scheme, sharding=sharding)
  return dataclasses.replace(config, precision=PRECISIONS[dtype]), params, tokenizer


def _open(path) -> weights.Weights:
  """A model that is not a run's."""
  where = files.absolute(path)
  if not where.exists():
    raise UserError(f'there is nothing at {path}; give a run folder, a Hugging Face folder or a .gguf file.')
  if where.is_dir() and not (where / 'config.json').exists():
    raise UserError(f'{path} is neither a run folder, which has checkpoints, nor a Hugging Face folder, which has a '
                    'config.json.')
  return weights.open(path)


def _run_model(path, step: int | None) -> tuple[int, config_lib.ModelConfig]:
  """(step, settings) of the finished model of a run folder."""
  step, run_config = load_run_config(path, step)
  config = _computable(run_config.model)
  return step, dataclasses.replace(config, ramp_step=step) if schemes.grows(config) else config


def _load_run(path, step: int | None, dtype, sharding, scheme: str | None):
  step, config = _run_model(path, step)
  if scheme is not None and scheme != config.scheme:
    raise UserError(f'{path} was trained with scheme {config.scheme!r}, not {scheme!r}.')
  if callable(sharding):
    params = _shared_params(path, step, config, dtype, sharding)
  else:
    params = _cast(stored.load_params(_checkpoints(path), step=step), dtype)
    params = layout.native(jax.device_put(params, None if config.loop == 'scan' else sharding), config)
    if sharding is not None and config.loop == 'scan':
      params = jax.device_put(params, sharding)
  folder = files.absolute(path) / 'tokenizer'
  return config, params, tokenizers.load(folder) if folder.is_dir() else None
