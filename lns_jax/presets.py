"""Shipped configs by name, and config files by path, as checked settings."""

import importlib.util
import json
import os
import pathlib

from ml_collections import config_dict

from lns_jax import config as config_lib
from lns_jax.errors import UserError, nearest


def config_names() -> dict[str, pathlib.Path]:
  """Shipped configs by name. Raises UserError where the package is on the path but not installed."""
  spec = importlib.util.find_spec('lns_jax.configs')
  if spec is None:
    raise UserError('lns_jax is found but not installed, and its configs lie elsewhere: pip install -e . in its folder.')
  folder = pathlib.Path(spec.submodule_search_locations[0])
  return {p.stem: p for p in sorted(folder.glob('*.py')) if not p.stem.startswith('_') and p.stem != 'common'}


def config_path(path_or_name: str) -> str:
  """'llama_130m' or 'dir/file.py', with or without ':argument', -> 'path' or 'path:argument'.

  Raises UserError when there is no such config.
  """
  name, colon, argument = path_or_name.partition(':')
  if name.endswith('.py') or os.sep in name:
    if not pathlib.Path(name).is_file():
      raise UserError(f'config file {name} does not exist.')
    return path_or_name
  names = config_names()
  if name not in names:
    raise UserError(f'no config is called {name!r}.{nearest(name, names)}')
  return f'{names[name]}{colon}{argument}'


def load_config(path_or_name: str) -> config_lib.RunConfig:
  """A shipped config by name, or a Python file with `get_config()`, checked; 'name:argument' passes an argument."""
  path, colon, argument = config_path(path_or_name).partition(':')
  spec = importlib.util.spec_from_file_location(f'lns_jax_config_{pathlib.Path(path).stem}', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return resolve(module.get_config(argument) if colon else module.get_config())


def from_run(folder: pathlib.Path) -> config_dict.ConfigDict:
  """The settings of a run folder, for a run that starts from its weights and reads text with its tokenizer."""
  values = json.loads((folder / 'run_info.json').read_text())['config']
  values['train']['init_from'] = str(folder.absolute())
  if (folder / 'tokenizer').is_dir():
    values['data']['tokenizer'] = str((folder / 'tokenizer').absolute())
  return config_dict.ConfigDict(_tuples(values))


def _tuples(value):
  """JSON knows lists alone, but settings are tuples, and an override must be of the type that it overrides."""
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  return tuple(value) if isinstance(value, list) else value


def resolve(values: config_dict.ConfigDict) -> config_lib.RunConfig:
  """ConfigDict -> checked frozen settings."""
  return config_lib.from_dict(config_lib.RunConfig, values.to_dict())
