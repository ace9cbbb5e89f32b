"""The loop over layers spread over the stages of a mesh: GPipe (arXiv 1811.06965), a share of the layers on each.

The rows of a batch are cut into M parts that follow each other through S stages. At tick t stage s works on part t - s,
so that S - 1 of M + S - 1 ticks find it without one: that share of the time is lost. Layers keep their own indices,
because their factors lie on the stages as their parameters do.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from lns_jax import config as config_lib
from lns_jax import mesh
from lns_jax.errors import UserError
from lns_jax.models import layout, loop

STAGE = PartitionSpec('stage')


def check(config: config_lib.ModelConfig, stages: int):
  """Raises UserError when the layers cannot be spread over so many stages."""
  if stages == 1:
    return
  if config.loop != 'scan':
    raise UserError(f'mesh.stage = {stages} spreads stacked layers over devices, which needs model.loop = scan, not '
                    f'{config.loop}.')
  runs, L = layout.runs(config), config.num_layers
  if len(runs) > 1:
    raise UserError(f'mesh.stage = {stages} needs layers that are all alike, but scheme {config.scheme!r} or its windows '
                    f"make {len(runs)} kinds of runs (layers {'; '.join(map(layout.run_name, runs))}); mesh.stage = 1 "
                    'takes them.')
  if L % stages:
    fits = [n for n in range(1, L + 1) if L % n == 0]
    raise UserError(f'mesh.stage = {stages} does not divide the {L} layers of the model; '
                    f'{min(fits, key=lambda n: abs(n - stages))} would.')


def check_rows(config: config_lib.ModelConfig, stages: int, rows: int, parts: int, where: str = 'a batch'):
  """Raises UserError when the rows of a batch cannot be cut into microbatches that every device has a share of.

  parts: devices that the rows are split over, mesh.data x mesh.fsdp.
  """
  M = config.microbatches or stages
  if stages > 1 and rows % (M * parts):
    unit, near = M * parts, max(round(rows / (M * parts)), 1) * M * parts
    fits = [n for n in range(1, rows + 1) if rows % (n * parts) == 0]
    other = f', or model.microbatches = {min(fits, key=lambda n: abs(n - M))}' if fits else ''
    raise UserError(f'{rows} rows of {where} do not divide over {M} microbatches of a pipeline x {parts} devices; {near} '
                    f'rows{other} would.')


def microbatches(config: config_lib.ModelConfig, rows: int) -> int:
  """M: as asked for, or the most that the rows allow (an evaluation may have few)."""
  asked, parts = config.microbatches or mesh.size('stage'), math.prod(map(mesh.size, mesh.ROWS))
  return math.gcd(asked, rows, max(rows // parts, 1))


def walk(config: config_lib.ModelConfig, trees: dict, x_BTD: jax.Array, ctx, step: Callable):
  """All blocks in turn, as `loop.walk`, of stacked layers on a mesh with stages.

  Arrays of ctx have rows first, B or 1 of them, or are scalars; what `step` keeps has rows first.

  Raises:
    UserError: see `check`.
  """
  check(config, mesh.size('stage'))
  (run,), M = layout.runs(config), microbatches(config, len(x_BTD))
  layers = trees[layout.run_name(run)], loop.varying(loop.run_factors(config, run))
  has_rows = jax.tree.map(lambda c: jnp.ndim(c) > 0 and len(c) > 1, ctx)
  parts = jax.tree.map(lambda c, cut: _cut(c, M) if cut else c, ctx, has_rows)
  def apply(layers, x, i):
    return loop.scan(config, run, layers, x, jax.tree.map(lambda c, cut: c[i] if cut else c, parts, has_rows), step)
  x_MBTD = mesh.constrain(_cut(x_BTD, M), (None, 'batch', 'seq', 'stream'))
  y_MBTD, kept = _staged(apply, layers, x_MBTD)
  return _joined(y_MBTD), {layout.run_name(run): jax.tree.map(jax.vmap(_joined), kept)}


def _cut(v: jax.Array, M: int) -> jax.Array:
  """[B, ...] -> [M, B / M, ...]: row r goes to part r mod M, so that every device keeps its own rows."""
  return v.reshape(-1, M, *v.shape[1:]).swapaxes(0, 1)


def _joined(v: jax.Array) -> jax.Array:
  """The inverse of `_cut`."""
  return v.swapaxes(0, 1).reshape(-1, *v.shape[2:])


def _staged(apply: Callable, layers, x_MBTD: jax.Array):
  """M parts of a batch through all stages.

  apply: (a stage's share of the layers, [B / M, T, D], the number of the part) -> (the stream behind them, kept).
  layers: a tree with a leading axis over all layers.

  Returns (the last stream of every part [M, B / M, T, D], kept with two axes more in front, layers and parts).
  """
  S, M = mesh.size('stage'), len(x_MBTD)
  def stage(number, layers, x_MBTD):
    number = number[0]  # jax.lax.axis_index is not known where other axes are left to the partitioner
    def tick(x, turn):
      t, entering = turn
      # A stage without a part works on one that it knows: whatever zeros would do to a norm, none of this is read.
      y, kept = apply(layers, jnp.where(number == 0, entering, x), jnp.clip(t - number, 0, M - 1))
      return jax.lax.ppermute(y, 'stage', [(s, s + 1) for s in range(S - 1)]), (y, kept)
    entering = jnp.pad(x_MBTD, [(0, S - 1)] + [(0, 0)] * (x_MBTD.ndim - 1), mode='edge')
    _, found = jax.lax.scan(tick, x_MBTD[0], (jnp.arange(M + S - 1), entering))
    y_MBTD, kept = jax.tree.map(lambda v: jax.lax.dynamic_slice_in_dim(v, number, M), found)
    return y_MBTD[None], jax.tree.map(lambda v: v.swapaxes(0, 1), kept)
  # Without the check of what varies over stages, which kernels do not declare.
  staged = jax.shard_map(stage, in_specs=(STAGE, STAGE, PartitionSpec()), out_specs=STAGE, axis_names={'stage'},
                         check_vma=False)
  y_SMBTD, kept = staged(np.arange(S), layers, x_MBTD)
  return y_SMBTD[-1], kept
