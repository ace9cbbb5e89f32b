"""Meshes, and where parameters and batches lie on them; the rules are in `lns_jax.mesh`."""

import contextlib
import dataclasses
import itertools
import math

import jax
import numpy as np
from flax.core import meta
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lns_jax import mesh as mesh_lib
from lns_jax.config import AXES, MeshConfig, ModelConfig, RunConfig, check_batch
from lns_jax.errors import UserError, around, divisors, nearest
from lns_jax.layers import fp8, splash
from lns_jax.mesh import ROWS, RULES, use  # `use` named here for all
from lns_jax.models import layout, loop, pipeline, transformer


def make_mesh(settings: MeshConfig, devices=None) -> Mesh:
  """A mesh over all devices, the outer part of one axis over the slices that they come in.

  Devices that do not say their slice (those of a CPU) are taken for equal consecutive parts, one a slice.

  Raises UserError when the sizes do not multiply to the number of devices, or do not fit their slices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = {name: getattr(settings, name) for name in AXES}
  known = math.prod(n for n in sizes.values() if n > 0)
  sizes = {name: len(devices) // known if n == -1 else n for name, n in sizes.items()}
  if math.prod(sizes.values()) != len(devices):
    raise UserError(_wrong_product({name: getattr(settings, name) for name in AXES}, len(devices)))
  groups, over = _slices(devices, settings.slices), settings.across
  if sizes[over] % len(groups):
    fits = [axis for axis in ('data', 'fsdp', 'stage') if not sizes[axis] % len(groups)]
    raise UserError(f'mesh.{over} = {sizes[over]} does not divide over the {len(groups)} slices; ' + (
        f'mesh.across = {fits[0]} would, or a mesh.{over} that is a multiple of {len(groups)}.' if fits else
        f'one of data, fsdp and stage must be a multiple of {len(groups)}, and mesh.across name it.'))
  inner = {**sizes, over: sizes[over] // len(groups)}
  # The outer index along `over` counts slices: the layout of mesh_utils.create_hybrid_device_mesh, for any devices.
  blocks = [mesh_utils.create_device_mesh(tuple(inner.values()), group, allow_split_physical_axes=True)
            for group in groups]
  auto = (jax.sharding.AxisType.Auto,) * len(AXES)
  return Mesh(np.concatenate(blocks, axis=AXES.index(over)), AXES, axis_types=auto)


def _wrong_product(asked: dict[str, int], count: int) -> str:
  """What is wrong with sizes (-1: what is left) that do not multiply to `count`, and which single change mends it."""
  given = {axis: n for axis, n in asked.items() if n not in (1, -1)} or {'data': 1}
  product, rest = math.prod(given.values()), -1 in asked.values()
  mended = []
  for axis, n in given.items():
    left, odd = divmod(count, product // n)
    if left and not odd:
      mended.append(f'mesh.{axis} = {around(n, divisors(left) if rest else [left])}')
  sizes = ' x '.join(f'mesh.{axis} = {n}' for axis, n in given.items())
  wrong = f'does not divide the {count} devices' if rest else f'takes {product} devices, and there are {count}'
  return f"{sizes} {wrong}; {' or '.join(mended) or 'mesh.data = -1 with all others 1'} would."


def _slices(devices: list, asked: int) -> list[list]:
  """The devices by slice; asked = 0: as many as they come in."""
  if not hasattr(devices[0], 'slice_index'):
    count = asked or 1
    if len(devices) % count:
      raise UserError(f'mesh.slices = {asked} does not divide the {len(devices)} devices; mesh.slices = '
                      f'{around(asked, divisors(len(devices)))} would.')
    size = len(devices) // count
    return [devices[i:i + size] for i in range(0, len(devices), size)]
  of = lambda device: device.slice_index
  groups = [list(g) for _, g in itertools.groupby(sorted(devices, key=of), of)]
  if asked not in (0, len(groups)):
    raise UserError(f'mesh.slices = {asked}, but the {len(devices)} devices come in {len(groups)}; set '
                    f'--config.mesh.slices={len(groups)}.')
  if len({len(g) for g in groups}) > 1:
    raise UserError(f'the {len(groups)} slices have {", ".join(str(len(g)) for g in groups)} devices; a mesh needs as '
                    'many in each.')
  return groups


def batch_parts(mesh: Mesh) -> int:
  """Number of parts that a batch is split into."""
  return math.prod(mesh.shape[axis] for axis in ROWS)


def batch(mesh: Mesh) -> NamedSharding:
  """Sharding of [B, ...] inputs."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def rows(mesh: Mesh, batch_size: int) -> np.ndarray:
  """Which rows of [batch_size, ...] inputs the devices of this process hold, rising.

  Those of several processes overlap where a row is split over processes, or is the same on several stages.
  """
  each = batch_size // batch_parts(mesh)
  return (each * parts_here(mesh)[:, None] + np.arange(each)).ravel()


def parts_here(mesh: Mesh) -> np.ndarray:
  """Which of the `batch_parts` the devices of this process hold, rising."""
  held = batch(mesh).addressable_devices_indices_map((batch_parts(mesh),))
  return np.unique([index.start or 0 for index, in held.values()])


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def parts(mesh: Mesh, over) -> int:
  """Devices that an entry of a PartitionSpec stands for."""
  return math.prod(mesh.shape[axis] for axis in mesh_lib.axes_of(over))


def params(mesh: Mesh, config: ModelConfig, rules=RULES):
  """Shardings of the parameters in the config's layout.

  Raises UserError when the rules do not fit the parameters or the mesh, or when a dimension does not divide over its
  mesh axes, naming the parameter, both, and what would divide.
  """
  stages, over = mesh.shape['stage'], mesh_lib.axes_of(dict(rules)['embed'])
  if config.loop == 'unrolled' and stages > 1 and not config.d_model % (stages * parts(mesh, over)):
    # Checkpoints of a pipeline are written in this layout: there too no device holds the layers of another stage.
    rules = tuple({**dict(rules), 'embed': ('stage', *over)}.items())
  boxed = jax.eval_shape(lambda: transformer.boxed_init(config, jax.random.key(0)))
  is_box = lambda x: isinstance(x, meta.AxisMetadata)
  named = [(jax.tree_util.keystr(path, simple=True, separator='/'), box)
           for path, box in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)]
  specs = [mesh_lib.spec(box.names, rules, name) for name, box in named]
  _check_known(mesh, rules)
  _check_divides(mesh, config, [(name, box.names, box.value.shape, s) for (name, box), s in zip(named, specs)])
  shardings = jax.tree.unflatten(jax.tree.structure(boxed, is_leaf=is_box), [NamedSharding(mesh, s) for s in specs])
  firsts, runs = shardings['layers'], layout.runs(config)
  if config.loop == 'unrolled':
    return {**shardings, 'layers': {str(l): firsts[str(run[0])] for run in runs for l in run}}
  pipeline.check(config, mesh.shape['stage'], mesh.size)
  over, = mesh_lib.spec(('layers',), rules)
  stacked = lambda s: NamedSharding(mesh, PartitionSpec(over, *s.spec))
  return {**shardings, 'layers': {layout.run_name(run): jax.tree.map(stacked, firsts[str(run[0])]) for run in runs}}


# The setting that a logical axis has its size from.
_SETTINGS = {'vocab': 'vocab_size', 'heads': 'num_heads', 'kv_heads': 'num_kv_heads', 'mlp': 'd_ff', 'embed': 'd_model'}


def _check_known(mesh: Mesh, rules):
  for axis, over in rules:
    for name in mesh_lib.axes_of(over):
      if name not in mesh.shape:
        raise UserError(f'lns_jax.mesh.RULES lays {axis!r} on the mesh axis {name!r}.{nearest(name, mesh.shape)}')


def _check_divides(mesh: Mesh, config: ModelConfig, leaves: list[tuple]):
  """leaves: (name, logical axes, shape, PartitionSpec) of each."""
  sizes = {}  # those that have to divide over a mesh axis
  for _, _, shape, spec in leaves:
    for size, over in zip(shape, spec):
      for axis in mesh_lib.axes_of(over):
        sizes.setdefault(axis, set()).add(size)
  for name, axes, shape, spec in leaves:
    for logical, size, over in zip(axes, shape, spec):
      if size % parts(mesh, over):
        axis = mesh_lib.axes_of(over)[-1]
        allowed = divisors(math.gcd(mesh.size, *sizes[axis]))
        raise UserError(
            f'{_what(config, logical, size)} ({name}) does not divide over the {parts(mesh, over)} devices of '
            f'mesh.{axis}; {_other_sizes(config, logical, size, parts(mesh, over))}'
            f'mesh.{axis} = {around(mesh.shape[axis], allowed)} would fit all parameters.')


def _what(config: ModelConfig, logical: str, size: int) -> str:
  setting = 'num_classes' if logical == 'vocab' and config.family == 'vit' else _SETTINGS.get(logical)
  return f'model.{setting} = {size}' if getattr(config, setting or '', None) == size else f'a dimension of {size}'


def _other_sizes(config: ModelConfig, logical: str, size: int, n: int) -> str:
  """'model.vocab_size = 32000 or 32008, or ' of sizes that n divides; '' where there is none near."""
  whole = {'heads': config.d_model, 'kv_heads': config.num_heads}.get(logical)  # which the number itself has to divide
  fits = [v for v in range(n, 2 * size + n, n) if not whole or not whole % v]
  what = _what(config, logical, size)
  return f'{what.split(" = ")[0]} = {around(size, fits)} would, or ' if what.startswith('model.') and fits else ''


def attention(config: RunConfig, mesh: Mesh) -> str:
  """A line for the user: what computes attention on the mesh, and why.

  Raises UserError when model.attention = splash cannot be there.
  """
  with use(mesh):
    return splash.describe(config.model, config.row_tokens, mesh.devices.flat[0].platform)


def check(config: RunConfig, mesh: Mesh):
  """Refuses, before anything is compiled, a run whose sizes do not divide over the mesh; one sentence, what would."""
  stages = mesh.shape['stage']
  pipeline.check(config.model, stages, mesh.size)
  factors = {'devices of mesh.data and mesh.fsdp': batch_parts(mesh), 'micro-batches': config.train.accumulation,
             'parts in the pipeline': pipeline.parts(config.model, stages)}
  check_batch('train.batch_size', config.train.batch_size, math.prod(factors.values()),
              ' x '.join(f'{n} {what}' for what, n in factors.items() if n > 1))
  if config.model.matmul == 'fp8':
    fp8.check(mesh.devices.flat[0])
  if config.model.remat == 'offload':
    loop.check_offload(mesh.devices.flat[0].platform)
  _check_sizes(config, mesh)


def _check_sizes(config: RunConfig, mesh: Mesh):
  T, sequence = config.row_tokens, mesh.shape['sequence']
  if T % sequence:
    cls = ' (model.pooling = mean would leave out the CLS token)' if config.model.has_cls else ''
    raise UserError(f'rows of {T} tokens{cls} do not divide over the {sequence} devices of mesh.sequence; '
                    f'mesh.sequence = {around(sequence, divisors(math.gcd(T, mesh.size)))} would.')
  params(mesh, config.model)


def fitting(config: RunConfig, devices=None) -> Mesh:
  """A mesh on which a finished run's model is evaluated by whatever devices there are.

  The run's own where it fits them and is no pipeline; else one whose devices share the parameters by fsdp.
  """
  devices = jax.devices() if devices is None else devices
  if config.mesh.stage == 1:
    with contextlib.suppress(UserError):
      mesh = make_mesh(config.mesh, devices)
      _check_sizes(config, mesh)
      return mesh
  return shared(config.model, devices)


def shared(config: ModelConfig, devices=None) -> Mesh:
  """A mesh on which as many devices of a slice as divide D share the parameters of any model."""
  devices = jax.devices() if devices is None else devices
  in_slice = len(devices) // len(_slices(devices, 0))
  return make_mesh(MeshConfig(fsdp=math.gcd(config.d_model, in_slice)), devices)


def share(config: ModelConfig):
  """Shardings of the parameters in the config's layout on the `shared` mesh: what `lns_jax.load` takes."""
  return params(shared(config), config)


def stack(mesh: Mesh, config: ModelConfig, tree):
  """Parameters in either layout, wherever they lie -> stacked for a scanned loop and split as in training."""
  scanned, unrolled = (dataclasses.replace(config, loop=loop) for loop in ('scan', 'unrolled'))
  where = params(mesh, scanned if layout.is_stacked(tree['layers']) else unrolled)
  stacked = jax.jit(lambda tree: layout.stack(tree, scanned), out_shardings=params(mesh, scanned))
  return stacked(jax.device_put(tree, where))
