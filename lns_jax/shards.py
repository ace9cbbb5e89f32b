"""Where every array of a state lies and what a device holds of it, as lines of text."""

import math
import typing

import jax
import numpy as np

from lns_jax import mesh
from lns_jax.models import by_layer, layout


class Row(typing.NamedTuple):
  """Leaves of the same name, shape and place in layers that the name lists: 'layers/1-12/attn/q'."""

  name: str
  shape: tuple[int, ...]  # of one leaf
  dtype: np.dtype
  sharding: jax.sharding.NamedSharding
  count: int

  @property
  def nbytes(self) -> int:
    """Of all leaves, whole."""
    return self.count * math.prod(self.shape) * self.dtype.itemsize

  @property
  def held(self) -> int:
    """Bytes of all leaves on one device."""
    return self.count * math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize

  @property
  def place(self) -> str:
    """'(stage, fsdp, -)': by dimension, the axes of more than one device that split it."""
    sizes = self.sharding.mesh.shape
    axes = lambda over: '+'.join(n for n in mesh.axes_of(over) if sizes[n] > 1) or '-'
    spec = tuple(self.sharding.spec) + (None,) * (len(self.shape) - len(self.sharding.spec))
    return f'({", ".join(map(axes, spec))})'


def rows(tree) -> list[Row]:
  """The leaves of a tree of arrays or ShapeDtypeStructs with a NamedSharding; equal ones of many layers are one row."""
  found = {}
  for path, leaf in by_layer.leaves(tree):
    before, _, rest = path.partition('layers/')
    number, _, name = rest.partition('/')
    alike = (before, name if number.isdecimal() else path, leaf.shape, np.dtype(leaf.dtype), leaf.sharding)
    found.setdefault(alike, []).append((path, int(number) if number.isdecimal() else None))
  def row(alike, members):
    before, name, shape, dtype, sharding = alike
    ids = tuple(sorted(l for _, l in members if l is not None))
    label = f'{before}layers/{layout.run_name(ids)}/{name}' if len(ids) > 1 else members[0][0]
    return Row(label, shape, dtype, sharding, len(members))
  return [row(*item) for item in found.items()]


def size(nbytes: int) -> str:
  """'12.3 MB', in decimal units."""
  for power, unit in ((4, 'TB'), (3, 'GB'), (2, 'MB'), (1, 'kB')):
    if nbytes >= 1000 ** power:
      return f'{nbytes / 1000 ** power:.3g} {unit}'
  return f'{nbytes} B'


def table(params) -> str:
  """One line for each parameter of a tree as of `rows`: shape, type, what splits each dimension, bytes on a device."""
  lines = [('parameter', 'shape', 'type', 'split by', 'bytes on a device', 'of')]
  for r in rows(params):
    times = f'{r.count} x ' if r.count > 1 else ''
    lines.append((r.name, f'{times}{list(r.shape)}', str(r.dtype), r.place, size(r.held), size(r.nbytes)))
  widths = [max(map(len, column)) for column in zip(*lines)]
  return '\n'.join('  '.join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)


def summary(params, opt_state) -> str:
  """A sentence: bytes on each device of parameters and optimizer, and what of the parameters is whole on all."""
  each = {what: rows(tree) for what, tree in (('parameters', params), ('optimizer state', opt_state))}
  held = [f'{size(sum(r.held for r in found))} of {what} (of {size(sum(r.nbytes for r in found))})'
          for what, found in each.items()]
  text = f'each device holds {" and ".join(held)}'
  whole = [r for r in each['parameters'] if r.held == r.nbytes]
  if len(whole) == len(each['parameters']) or not whole:
    return text
  largest = max(whole, key=lambda r: r.held)
  return (f'{text}; {size(sum(r.held for r in whole))} of the parameters are whole on each, the largest of them '
          f'{largest.name} with {size(largest.held)}')
