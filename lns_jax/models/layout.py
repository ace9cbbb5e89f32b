"""Two layouts of the layers' parameters, and the way between them.

Canonical, on disk and for the unrolled loop: params['layers']['7'] is layer 7.
Stacked, for the scanned loop: params['layers']['5-12'] holds layers 5..12 behind a leading axis, one
entry for each run of layers that obey the same row.

Both directions work on any tree that contains such `layers` dictionaries, an optimizer's state included.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lns_jax import config as config_lib
from lns_jax.layers import schemes

Run = tuple[int, ...]


def runs(config: config_lib.ModelConfig) -> list[Run]:
  """Layer ids in maximal runs that one compiled body can serve."""
  same = lambda l: (schemes.row(config, l), config.window(l))
  return [tuple(ids) for _, ids in itertools.groupby(config.layer_ids, same)]


def run_name(run: Run) -> str:
  """(1, 2, 3, 5) -> '1-3,5-5': always with a dash, which tells a stacked entry from a single layer."""
  spans = [list(g) for _, g in itertools.groupby(enumerate(run), lambda p: p[1] - p[0])]
  return ','.join(f'{s[0][1]}-{s[-1][1]}' for s in spans)


def run_ids(name: str) -> Run:
  """'1-3,5-5' -> (1, 2, 3, 5)."""
  spans = [map(int, s.split('-')) for s in name.split(',')]
  return tuple(l for first, last in spans for l in range(first, last + 1))


def is_stacked(layers: dict) -> bool:
  """Whether a `layers` dictionary has a leading layer axis."""
  return any('-' in name for name in layers)


def _convert(tree, change: Callable[[dict], dict]):
  has_layers = lambda t: isinstance(t, dict) and 'layers' in t
  return jax.tree.map(lambda t: {**t, 'layers': change(t['layers'])} if has_layers(t) else t, tree, is_leaf=has_layers)


def stack(tree, config: config_lib.ModelConfig):
  """Either layout -> stacked by the config's runs. A tree that is so already is returned as it is."""
  names = {run_name(run): run for run in runs(config)}
  def change(layers):
    if layers.keys() == names.keys():
      return layers
    layers = single(layers)
    return {name: jax.tree.map(lambda *x: jnp.stack(x), *(layers[str(l)] for l in run)) for name, run in names.items()}
  return _convert(tree, change)


def single(layers: dict) -> dict:
  """A `layers` dictionary with one entry a layer."""
  if not is_stacked(layers):
    return layers
  return {str(l): jax.tree.map(lambda x, i=i: x[i], stacked)
          for name, stacked in layers.items() for i, l in enumerate(run_ids(name))}


def joined(layers: dict):
  """A `layers` dictionary, in either layout -> one tree whose leaves have a leading axis over all layers, ids rising.

  Whatever the order of its names: JAX sorts those of a dictionary as strings, 10 before 2.
  """
  if not is_stacked(layers):
    return jax.tree.map(lambda *x: jnp.stack(x), *(layers[name] for name in sorted(layers, key=int)))
  return jax.tree.map(lambda *x: jnp.concatenate(x), *(layers[name] for name in sorted(layers, key=run_ids)))


def unstack(tree):
  """Stacked -> canonical. A canonical tree is returned as it is."""
  return _convert(tree, single)


def native(tree, config: config_lib.ModelConfig):
  """The layout that the config's loop works on."""
  return stack(tree, config) if config.loop == 'scan' else unstack(tree)
