"""The mesh in force, and the one table that says which logical axis lies on which of its axes."""

import jax
from jax.sharding import Mesh, PartitionSpec

from lns_jax.errors import UserError, nearest

ROWS = ('data', 'fsdp')  # those that the rows of a batch are split over

# Logical axis -> mesh axes. Parameters are split by stage over the layers, by fsdp over D and by tensor over heads,
# MLP width and vocabulary; rows of a batch lie on data and fsdp together, positions of a row on sequence.
RULES = (
    ('batch', ROWS),
    ('seq', 'sequence'),
    ('keys', None),  # positions that every query of a row may need: gathered
    ('stream', None),
    ('layers', 'stage'),
    ('embed', 'fsdp'),
    ('vocab', 'tensor'),
    ('heads', 'tensor'),
    ('kv_heads', 'tensor'),
    ('head_dim', None),
    ('mlp', 'tensor'),
    ('norm', None),
    ('patch', None),
    ('position', None),
    ('span', None),
)


def use(mesh: Mesh):
  """A context in which the mesh is known to what is traced or run."""
  return jax.set_mesh(mesh)


def spec(axes: tuple[str | None, ...], rules=RULES, what: str = 'an array') -> PartitionSpec:
  """Where an array lies whose dimensions have these logical axes; None is a dimension that no rule splits.

  Raises UserError for a logical axis without a rule, or when two of them would be split over the same mesh axis.
  """
  table, found, taken = dict(rules), [], {}
  for axis in axes:
    if axis is not None and axis not in table:
      raise UserError(f'{what} has the logical axis {axis!r}, for which lns_jax.mesh.RULES has no rule.'
                      f'{nearest(axis, table)}')
    over = table.get(axis)
    for name in axes_of(over):
      if name in taken:
        raise UserError(f'{what} has the logical axes {taken[name]!r} and {axis!r}, and lns_jax.mesh.RULES lays both '
                        f'on the mesh axis {name!r}; another rule for one of them would do.')
      taken[name] = axis
    found.append(over)
  return PartitionSpec(*found)


def axes_of(over) -> tuple[str, ...]:
  """The mesh axes that an entry of a PartitionSpec (None, an axis, or several) names."""
  return (over,) if isinstance(over, str) else tuple(over or ())


def constrain(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """x, laid on the mesh in force as the rules say of its logical axes; without one, or outside of a trace, as it is."""
  if jax.sharding.get_abstract_mesh().empty or not isinstance(x, jax.core.Tracer):
    return x
  return jax.lax.with_sharding_constraint(x, spec(axes))


def size(axis: str) -> int:
  """Devices along an axis of the mesh in force, 1 where there is none."""
  return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def platform() -> str:
  """'tpu', 'gpu' or 'cpu': what the mesh in force is made of, which need not be what compiles for it."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device is not None else jax.default_backend()
