"""lns_jax: train language models with any norm placement, and see what their depth does.

The names below are the whole public surface; scripts and notebooks need nothing else.
"""

import importlib

_HOME = {
    'ModelConfig': 'lns_jax.config',
    'RunConfig': 'lns_jax.config',
    'UserError': 'lns_jax.errors',
    'load_config': 'lns_jax.presets',
    'init': 'lns_jax.models.transformer',
    'forward': 'lns_jax.models.transformer',
    'states': 'lns_jax.models.transformer',
    'apply': 'lns_jax.models.transformer',
    'remove_layers': 'lns_jax.models.transformer',
    'load': 'lns_jax.interop.load',
}

__all__ = [*_HOME, 'depth']


def __getattr__(name: str):
  # Imported at first use, so that command-line help does not wait for jax.
  if name == 'depth':
    return importlib.import_module('lns_jax.depth')
  if name in _HOME:
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value
  raise AttributeError(f'module lns_jax has no attribute {name!r}')


def __dir__():
  return __all__
