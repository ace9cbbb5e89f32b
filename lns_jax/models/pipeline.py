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
from lns_jax.errors import UserError, around, divisors
from lns_jax.models import layout, loop

STAGE = PartitionSpec('stage')


def check(config: config_lib.ModelConfig, stages: int, devices: int = 0):
  """Raises UserError when the layers cannot be spread over so many stages of `devices` (0: of any number)."""
  if stages == 1:
    return
  if config.loop != 'scan':
    raise UserError(f'mesh.stage = {stages} spreads stacked layers over devices, which needs model.loop = scan, not '
                    f'{config.loop}.')
  runs, L = layout.runs(config), config.num_layers
  if len(runs) > 1:
    raise UserError(f'mesh.stage = {stages} needs layers that are all alike, but scheme and windows of this model make '
                    f"runs of unlike ones ({'; '.join(map(layout.run_name, runs))}); mesh.stage = 1 takes them.")
  if L % stages:
    raise UserError(f'mesh.stage = {stages} does not divide the {L} layers of the model; '
                    f'{around(stages, divisors(math.gcd(L, devices)))} would.')


def parts(config: config_lib.ModelConfig, stages: int) -> int:
  """M as the settings have it: a batch of training must be a multiple of it times what its rows are split over."""
  return 1 if stages == 1 else config.microbatches or stages


def _fitting(config: config_lib.ModelConfig, B: int) -> int:
  """M for B rows: of fewer than in training, as an evaluation may have, the most that leaves every device some."""
  return math.gcd(parts(config, mesh.size('stage')), B, max(B // math.prod(map(mesh.size, mesh.ROWS)), 1))


def walk(config: config_lib.ModelConfig, variables: dict, x_BTD: jax.Array, ctx, step: Callable):
  """All blocks in turn, as `loop.walk`, of stacked layers on a mesh with stages.

  Arrays of ctx have rows first, B or 1 of them, or are scalars; what `step` keeps has rows first.

  Raises:
    UserError: see `check`.
  """
  check(config, mesh.size('stage'))
  (run,), M = layout.runs(config), _fitting(config, len(x_BTD))
  layers, k = loop.prepared(config, run, variables[layout.run_name(run)])
  has_rows = jax.tree.map(lambda c: jnp.ndim(c) > 0 and len(c) > 1, ctx)
  ctx = jax.tree.map(lambda c, cut: _cut(c, M) if cut else c, ctx, has_rows)
  def apply(layers, x, i):
    return loop.scan(config, run, layers, k, x, jax.tree.map(lambda c, cut: c[i] if cut else c, ctx, has_rows), step)
  x_MBTD = mesh.constrain(_cut(x_BTD, M), (None, 'batch', 'seq', 'stream'))
  y_MBTD, kept = _staged(apply, layers, x_MBTD)
  return _joined(y_MBTD), {layout.run_name(run): jax.tree.map(jax.vmap(_joined), kept)}


def _cut(v: jax.Array, M: int) -> jax.Array:
  """[B, ...] -> [M, B / M, ...]: row r goes to part r mod M, so that every device keeps its own rows."""
  return jnp.asarray(v).reshape(-1, M, *v.shape[1:]).swapaxes(0, 1)


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
  def stage(layers, x_1MBTD):
    number = jax.lax.axis_index('stage')
    def tick(x, turn):
      t, entering = turn
      y, kept = apply(layers, jnp.where(number == 0, entering, x), jnp.clip(t - number, 0, M - 1))
      return jax.lax.ppermute(y, 'stage', [(s, s + 1) for s in range(S - 1)]), (y, kept)
    # A stage without a part works on one that it knows: whatever zeros would do to a norm, none of this is read.
    entering = jnp.concatenate([x_1MBTD[0], *[x_1MBTD[0, -1:]] * (S - 1)])
    _, found = jax.lax.scan(tick, entering[0], (jnp.arange(M + S - 1), entering))
    y_MBTD, kept = jax.tree.map(lambda v: jax.lax.dynamic_slice_in_dim(v, number, M), found)
    y_MBTD = jnp.where(number == S - 1, y_MBTD, jnp.zeros_like(y_MBTD))
    return y_MBTD[None], jax.tree.map(lambda v: v.swapaxes(0, 1), kept)
  # Without the check of what varies over stages, which kernels do not declare.
  staged = jax.shard_map(stage, in_specs=STAGE, out_specs=STAGE, axis_names={'stage'}, check_vma=False)
  y_SMBTD, kept = staged(layers, jax.lax.broadcast(x_MBTD, (S,)))
  # Sums over stages, of this and of the gradient of x, are left to the partitioner: inside of shard_map XLA for CPUs
  # fails on those of bfloat16.
  return jax.lax.reduce(y_SMBTD, np.zeros((), y_SMBTD.dtype), jax.lax.add, (0,)), kept
