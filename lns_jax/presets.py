"""Shipped configs by name, and config files by path, as checked settings."""

import importlib.util
import os
import pathlib

from ml_collections import config_dict

from lns_jax import config as config_lib
from lns_jax.errors import UserError, nearest


def config_names() -> dict[str, pathlib.Path]:
  """Shipped configs by name."""
  spec = importlib.util.find_spec('lns_jax.configs')
  folder = pathlib.Path(spec.submodule_search_locations[0])
  return {p.stem: p for p in sorted(folder.glob('*.py')) if not p.stem.startswith('_') and p.stem != 'common'}


def config_path(path_or_name: str) -> pathlib.Path:
  """File of a config given by name ('llama_130m') or by path. Raises UserError when there is none."""
  if path_or_name.endswith('.py') or os.sep in path_or_name:
    path = pathlib.Path(path_or_name)
    if not path.is_file():
      raise UserError(f'config file {path_or_name} does not exist.')
    return path
  names = config_names()
  if path_or_name not in names:
    raise UserError(f'no config is called {path_or_name!r}.{nearest(path_or_name, names)}')
  return names[path_or_name]


def load_config(path_or_name: str) -> config_lib.RunConfig:
  """A shipped config by name, or a Python file with `get_config()`, checked."""
  path = config_path(path_or_name)
  spec = importlib.util.spec_from_file_location(f'lns_jax_config_{path.stem}', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return resolve(module.get_config())


def resolve(values: config_dict.ConfigDict) -> config_lib.RunConfig:
  """ConfigDict -> checked frozen settings."""
  return config_lib.from_dict(config_lib.RunConfig, values.to_dict())
