"""Sums over the leaves of a tree by the layer that each belongs to: of any model's parameters, not only of ours."""

import itertools
import re
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.errors import UserError
from lns_jax.layers.norms import wide
from lns_jax.models import layout

# Where a leaf belongs: to one layer, outside of the layers (None), or its leading axis runs over these layers.
Place = int | Iterable[int] | None

_RUN = re.compile(r'(?:^|/)layers/(\d+-\d+(?:,\d+-\d+)*)/')  # our own stacked layout, see `layout`
_NUMBERED = re.compile(r'(?:^|[/.])(?:\w*(?:layers?|blocks?)|h)[/._]?(\d+)(?=[/._]|$)', re.IGNORECASE)
_STACKED = re.compile(r'(?:^|[/.])(?:layers|blocks|h)(?=[/.]|$)')


def layer_of(path: str) -> Place:
  """The place of a leaf by the usual names: 'layers/7/attn/q', 'layers_7/kernel', 'h.7', 'EncoderBlock_7', 'blocks/7'.

  Of several numbers the outermost counts. Names such as 'layers/kernel', without a number behind 'layers', 'blocks' or
  'h', stand for a leading axis over layers that count from 0; our own 'layers/1-12/attn/q' for layers 1 to 12.
  """
  if run := _RUN.search(path):
    return layout.run_ids(run[1])
  if number := _NUMBERED.search(path):
    return int(number[1])
  return itertools.count() if _STACKED.search(path) else None


def leaves(tree) -> list[tuple[str, jax.Array]]:
  """(path, leaf) of all leaves, paths as 'layers/7/attn/q'."""
  return [(jax.tree_util.keystr(path, simple=True, separator='/'), x)
          for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def ids(path: str, place: int | Iterable[int], leaf: jax.Array) -> tuple[int, ...]:
  """The layers of a leaf that has some. Raises UserError when its leading axis runs over more than are named."""
  if isinstance(place, int):
    return (place,)
  if not leaf.ndim:
    raise UserError(f'{path} is a scalar, but layer_of says that its leading axis runs over layers.')
  found = tuple(itertools.islice(place, len(leaf)))
  if len(found) < len(leaf):
    raise UserError(f'{path} has {len(leaf)} entries along its leading axis, but layer_of names {len(found)} layers.')
  return found


def sums(function: Callable[..., jax.Array], *trees,
         layer_of: Callable[[str], Place] = layer_of) -> tuple[jax.Array, jax.Array]:
  """Sums of function(leaf, leaf, ...), entry by entry, over equal trees; in float32 or wider.

  Returns ([L] over each layer's leaves, in the order of their numbers; [] over all leaves, those outside included).

  Raises:
    UserError: the trees differ in structure, no path names a layer, or stacked leaves disagree about the layers.
  """
  first, *rest = map(leaves, trees)
  if any([path for path, _ in first] != [path for path, _ in other] for other in rest):
    raise UserError('the trees (gradients and updates, say) do not have the same leaves.')
  totals, outside = {}, 0.0
  for (path, leaf), *others in zip(first, *rest):
    values = function(*(x.astype(wide(x)) for x in (leaf, *(x for _, x in others))))
    place = layer_of(path)
    if place is None:
      outside += jnp.sum(values)
      continue
    of = ids(path, place, leaf)
    if any(of != other and set(of) & set(other) for other in totals):
      which = f'layers {of[0]} to {of[-1]}' if len(of) > 1 else f'layer {of[0]}'
      raise UserError(f'{path} seems to belong to {which}, but other leaves to only a part of that or to more; give a '
                      'layer_of that tells the layer of each path.')
    axes = range(0 if isinstance(place, int) else 1, values.ndim)
    totals[of] = totals.get(of, 0) + jnp.sum(values, axis=tuple(axes))
  if not totals:
    raise UserError(f'no path names a layer, the first is {first[0][0]!r}; give a layer_of from a path to its layer.')
  in_order = jnp.concatenate([jnp.atleast_1d(total) for total in totals.values()])
  in_order = in_order[np.argsort([l for of in totals for l in of])]
  return in_order, outside + jnp.sum(in_order)
