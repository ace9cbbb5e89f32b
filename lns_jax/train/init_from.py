"""A run that starts from the weights of another run's model, such as one that lost layers: `train.init_from`."""

import dataclasses
import pathlib

from lns_jax import files, remote
from lns_jax.config import EXECUTION, ModelConfig, RunConfig, changed, from_dict
from lns_jax.data import tokenizers
from lns_jax.distributed import say
from lns_jax.errors import UserError
from lns_jax.layers import schemes
from lns_jax.train import stored

# Settings of a model that its weights do not depend on, once they are there.
_OTHERS = ('num_layers', 'init', 'init_std', 'alpha_init', 'layerscale_init', 'dyt_alpha', *EXECUTION)


def _folder(config: RunConfig) -> pathlib.Path:
  return files.absolute(remote.local(config.train.init_from))


def with_its_layers(config: RunConfig) -> RunConfig:
  """The config with the layers of the model that it starts from, where those are some of the layers asked for.

  Raises:
    UserError: there is no such model, or another setting of it differs, or its scheme grows with the run's updates.
  """
  folder = config.train.init_from
  if not folder:
    return config
  found = stored.load_config(remote.checkpoints(_folder(config)))
  if found is None:
    raise UserError(f'train.init_from = {folder!r} is not a run folder with a finished checkpoint.')
  model = from_dict(RunConfig, found[1]).model
  if schemes.grows(model):
    raise UserError(f'train.init_from = {folder!r} has model.scheme = {model.scheme}, whose branches grow from 0 with '
                    'the updates of a run: a second run would take from it what it has learned.')
  _check_same(folder, model, config.model)
  return changed(config, {'model': {'layer_ids': model.layer_ids, 'num_layers': model.num_layers}})


def _check_same(folder: str, model: ModelConfig, asked: ModelConfig):
  for name in (f.name for f in dataclasses.fields(model) if f.name not in _OTHERS):
    old, new = getattr(model, name), getattr(asked, name)
    whole = name == 'layer_ids' and new == tuple(range(1, asked.depth + 1))
    if old != new and not whole:
      raise UserError(f'train.init_from = {folder!r} has model.{name} = {old!r}, but {new!r} was asked for; set '
                      f'--config.model.{name}={old}.')


def check_tokenizer(config: RunConfig, tokenizer: tokenizers.Tokenizer | None):
  """Refuses text whose ids do not mean what they meant to the model that the run starts from."""
  if config.train.init_from and tokenizer is not None:
    own = _folder(config) / 'tokenizer'
    if not own.is_dir():  # lost, or of an imported model that came without one
      say(f'train.init_from = {config.train.init_from!r} has no tokenizer, so that it cannot be compared with that of '
          'this text.')
    elif tokenizers.load(own).hash != tokenizer.hash:
      raise UserError(f'train.init_from = {config.train.init_from!r} was trained with another tokenizer than that '
                      f'of this text; set --config.data.tokenizer to the file in {own}.')


def params(config: RunConfig, shardings):
  """The parameters that the run starts from, as they were saved, in the canonical layout and with its shardings."""
  return stored.load_params(remote.checkpoints(_folder(config)), shardings=shardings)
