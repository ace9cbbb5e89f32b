"""What a run is made of besides its state, and how that state comes to be."""

import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import typing
from collections.abc import Callable

import jax

from lns_jax import config as config_lib
from lns_jax import sharding
from lns_jax.config import RunConfig
from lns_jax.layers import schemes
from lns_jax.models import layout, transformer
from lns_jax.train import evaluate, init_from
from lns_jax.train import step as step_lib


def release_compiler_memory():
  """Gives back what the compiler freed but glibc keeps: 0.4 GB for a 20M-parameter step on a CPU."""
  with contextlib.suppress(OSError, AttributeError):  # not glibc
    ctypes.CDLL('libc.so.6').malloc_trim(0)


@dataclasses.dataclass(frozen=True)
class Program:
  """Settings, mesh, length, and the sharding of every leaf of the state: what the compiled steps of a run depend on."""

  config: RunConfig
  mesh: jax.sharding.Mesh
  steps: int
  shardings: step_lib.TrainState

  def canonical(self) -> typing.Self:
    """The same with the unrolled layout, in which checkpoints are written."""
    config = config_lib.changed(self.config, {'model': {'loop': 'unrolled'}})
    return dataclasses.replace(
        self, config=config, shardings=step_lib.state_shardings(self.mesh, config, self.steps))

  @functools.cached_property
  def to_canonical(self) -> Callable:
    """(parameters, optimizer's state) as checkpoints hold them, of those in the layout of the loop."""
    of = self.canonical().shardings
    # With shardings: a slice of stacked layers would otherwise be whole on every device.
    return jax.jit(layout.unstack, out_shardings=(of.params, of.opt_state)) if self._scans else lambda tree: tree

  @functools.cached_property
  def to_native(self) -> Callable:
    """The inverse of `to_canonical`."""
    of, stack = self.shardings, lambda tree: layout.stack(tree, self.config.model)
    return jax.jit(stack, out_shardings=(of.params, of.opt_state)) if self._scans else lambda tree: tree

  @property
  def _scans(self) -> bool:
    return self.config.model.loop == 'scan'

  def abstract_state(self) -> step_lib.TrainState:
    """Shapes, types and shardings of the state."""
    shapes = step_lib.shapes(self.config, self.steps)
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, self.shardings)

  def abstract_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, types and shardings of a batch of training."""
    where, row = sharding.batch(self.mesh), transformer.family(self.config.model).row_shapes(
        self.config.model, self.config.data.seq_len)
    return {k: jax.ShapeDtypeStruct((rows, *r.shape), r.dtype, sharding=where) for k, r in row.items()}

  def lower_train_step(self):
    """(state, batch) -> (state, metrics), traced and lowered."""
    where = sharding.batch(self.mesh)
    jitted = jax.jit(
        step_lib.make_train_step(self.config, self.steps), donate_argnums=0,
        in_shardings=(self.shardings, where), out_shardings=(self.shardings, sharding.replicated(self.mesh)))
    with sharding.use(self.mesh):
      return jitted.lower(self.abstract_state(), self.abstract_batch(self.config.train.batch_size))

  def compile_train_step(self):
    """The compiled train step, ahead of time, so that a failure comes early."""
    compiled = self.lower_train_step().compile()
    release_compiler_memory()
    return compiled

  def eval_step(self):
    """Jitted evaluation of a batch, see `lns_jax.train.evaluate`."""
    return evaluate.make_eval_step(self.config.model, self.mesh, self.shardings.params)


@dataclasses.dataclass(frozen=True)
class Run(Program):
  """A program with its folder and data, and how its state comes to be."""

  workdir: pathlib.Path
  dataset: typing.Any

  def fresh_state(self) -> step_lib.TrainState:
    """The initial state, sharded. Where the scheme's start depends on data, the run's first rows are read."""
    c, batch = self.config, None
    if c.train.init_from:
      shapes = step_lib.shapes(c, self.steps).params
      def start(saved):
        params = jax.tree.map(lambda x, s: x.astype(s.dtype), layout.native(saved, c.model), shapes)
        return step_lib.state_of(c, self.steps, params)
      return jax.jit(start, out_shardings=self.shardings)(init_from.params(c, self.canonical().shardings.params))
    if schemes.has(c.model, 'profiled'):
      B, k = c.train.batch_size, c.train.accumulation  # of the first micro-batch, rows 0, k, 2 k, ...
      rows = k * sharding.rows(self.mesh, B // k)
      batch = evaluate.place(self.mesh, next(self.dataset.train_batches(c.data.seed, B, num_steps=1, rows=rows)))
    with sharding.use(self.mesh):
      return jax.jit(lambda b: step_lib.init_state(c, self.steps, b), out_shardings=self.shardings)(batch)
