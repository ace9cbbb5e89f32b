"""Meshes, and where parameters and batches lie on them; the rules are in `lns_jax.mesh`."""

import math

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lns_jax.config import AXES, MeshConfig, ModelConfig
from lns_jax.errors import UserError
from lns_jax.mesh import ROWS, RULES, use  # `use` named here for all
from lns_jax.models import layout, transformer


def make_mesh(settings: MeshConfig, devices=None) -> Mesh:
  """A mesh over all devices. Raises UserError when the sizes do not multiply to their number."""
  devices = jax.devices() if devices is None else devices
  sizes = {name: getattr(settings, name) for name in AXES}
  known = math.prod(n for n in sizes.values() if n > 0)
  sizes = {name: len(devices) // known if n == -1 else n for name, n in sizes.items()}
  if math.prod(sizes.values()) != len(devices):
    asked = {name: getattr(settings, name) for name in sizes}
    raise UserError(f'mesh sizes {asked} do not multiply to the {len(devices)} devices, -1 standing for what is left.')
  auto = (jax.sharding.AxisType.Auto,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=devices)


def batch_parts(mesh: Mesh) -> int:
  """Number of parts that a batch is split into."""
  return math.prod(mesh.shape[axis] for axis in ROWS)


def batch(mesh: Mesh) -> NamedSharding:
  """Sharding of [B, ...] inputs."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def params(mesh: Mesh, config: ModelConfig):
  """Shardings of the parameters in the config's layout.

  Raises UserError when a dimension does not divide over its mesh axis, naming both.
  """
  boxed = jax.eval_shape(lambda: transformer.boxed_init(config, jax.random.key(0)))
  specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), RULES)
  flat, _ = jax.tree_util.tree_flatten_with_path(nn.unbox(boxed))
  for (path, leaf), spec in zip(flat, jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))):
    for size, axis in zip(leaf.shape, spec):
      if axis is not None and size % mesh.shape[axis]:
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        raise UserError(f'{name} has a dimension of {size} that does not divide over the {mesh.shape[axis]} devices '
                        f'of mesh.{axis}.')
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
  return _stacked(shardings, mesh, config) if config.loop == 'scan' else shardings


def _stacked(shardings, mesh: Mesh, config: ModelConfig):
  """Adds the layer axis of the scanned layout."""
  over, = nn.logical_to_mesh_axes(('layers',), RULES)
  add = lambda s: NamedSharding(mesh, PartitionSpec(over, *s.spec))
  layers = {layout.run_name(run): jax.tree.map(add, shardings['layers'][str(run[0])]) for run in layout.runs(config)}
  return {**shardings, 'layers': layers}
