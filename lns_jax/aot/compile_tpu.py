"""Compiles the steps of a run for a TPU topology, on a machine without one, and reads off what they would take there.

Nothing is run and no data are opened: the numbers are the compiler's, or are counted in the program that it made.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import pathlib
import re
import sys
import tempfile
import threading
import time
from typing import Any

import jax
from jax.experimental import topologies

from lns_jax import config as config_lib
from lns_jax import host, sharding, shards
from lns_jax.aot import costs, fit, hlo, roofline, table
from lns_jax.config import RunConfig
from lns_jax.distributed import say
from lns_jax.errors import UserError
from lns_jax.train import chips, evaluate, init_from, mfu
from lns_jax.train import step as step_lib
from lns_jax.train.run import Program

NEVER_RUN = 'compiled, never run'


def compile_for(config: RunConfig, topology: str, *, slices: int = 0, with_eval: bool = True,
                suggest: bool = True) -> dict[str, Any]:
  """Compiles the train step, and the evaluation step, of a run for a topology.

  Args:
    topology: 'v5e:4x4' and the like, of one slice.
    slices: of a pod; 0: as mesh.slices says, else one.
    suggest: whether, when a step does not fit, changed settings are compiled until one does.

  Returns:
    of the train step {'hbm_bytes_per_chip', 'hbm_limit', 'fits' (the evaluation step too), 'argument_bytes',
    'temp_bytes', 'output_bytes' (beside the arguments), 'code_bytes', 'host_bytes', 'saving_bytes' (while the state is
    saved or restored, which 'fits' asks too), 'flops' (of the program on a chip, loops by their turns), 'kernel_flops'
    (the part of it that is by formula), 'model_flops' (of all chips, as `train.mfu` counts), 'bytes' (of main memory,
    loops by their turns), 'compiler_flops', 'compiler_bytes' (the compiler's own counts, a loop's body once),
    'collectives' {kind: {'count', 'bytes'}}, 'fusions', 'not_counted' (kernels of unknown FLOPs, loops of unknown
    length), 'roofline' {as of `aot.roofline`, 'mfu', 'tokens_per_second'}, 'compile_seconds'}; of what was compiled
    {'topology', 'devices', 'slices', 'libtpu' (the compiler's version)}; 'eval' (as of the train step), 'suggestion' (a
    list of flags; None when it fits or nothing was found), 'status', 'seconds'. Bytes and FLOPs are of one device.
    Where the compiler refuses for want of memory there are its own figures and 'saving_bytes' alone.

  Raises:
    UserError: topology, mesh or batch are not possible, libtpu cannot be loaded, or its compiler fails.
  """
  start = time.perf_counter()
  slices = slices or config.mesh.slices or 1
  target = Target.of(topology, slices)
  config = for_tpu(config, slices)
  program = target.program(config)
  say(f'{topology}: {len(target.devices)} x {target.devices[0].device_kind}, libtpu {libtpu()}; {NEVER_RUN}.')
  say(sharding.attention(config, program.mesh))
  result = target.compile(program, with_eval)
  found = None
  if not result['fits'] and suggest:
    found = fit.nearest(config, lambda c: target.compile(target.program(c), with_eval),
                        lambda c: saving(target.program(c)), target.chip.hbm)
  result |= {'topology': topology, 'devices': len(target.devices), 'slices': slices, 'libtpu': libtpu(),
             'suggestion': found, 'status': NEVER_RUN, 'seconds': time.perf_counter() - start}
  say(table.of(result))
  return result


def for_tpu(config: RunConfig, slices: int) -> RunConfig:
  """The config as a run on a TPU resolves it: precision `auto` is bfloat16 there, whatever this machine is."""
  config = init_from.with_its_layers(config)
  precision = 'bfloat16' if config.model.precision == 'auto' else config.model.precision
  return config_lib.changed(config, {'model': {'precision': precision}, 'mesh': {'slices': slices}})


@dataclasses.dataclass(frozen=True)
class Target:
  """A topology: its chip and its devices."""

  chip: chips.Chip
  devices: tuple[Any, ...]

  @classmethod
  def of(cls, topology: str, slices: int = 1) -> 'Target':
    """Raises UserError for a topology that is not lent, or without libtpu."""
    name, shape = chips.parse(topology)
    chip = chips.CHIPS[name]
    options = dict(chip.options) | ({'num_slices': slices} if slices > 1 else {})
    if min(shape) < 2:  # libtpu takes a host to have 2 x 2 chips
      options['chips_per_host_bounds'] = (*shape, 1, 1)[:3]
    try:
      with host.without_stderr():
        found = topologies.get_topology_desc(
            platform='tpu', topology_name=f'{chip.library or name}:{"x".join(map(str, shape))}', **options)
    except jax.errors.JaxRuntimeError as e:
      raise UserError(f'libtpu does not give --topology={topology}: {_first_line(e)}') from None
    return cls(chip, tuple(found.devices))

  def program(self, config: RunConfig) -> Program:
    """The run's program on these devices. Raises UserError when mesh, batch or attention cannot be on them."""
    mesh = sharding.make_mesh(config.mesh, list(self.devices))
    sharding.check(config, mesh)
    sharding.attention(config, mesh)
    steps = config_lib.num_steps(config, num_rows=10**9)  # the rows of a data set that is not opened
    return Program(config, mesh, steps, step_lib.state_shardings(mesh, config, steps))

  def compile(self, program: Program, with_eval: bool) -> dict[str, Any]:
    """Compiles, both steps side by side, and reads. Returns as of `compile_for`."""
    c, mesh = program.config, program.mesh
    with concurrent.futures.ThreadPoolExecutor() as pool:
      with alive('compiling' + (' both steps' if with_eval else '')):
        where = f'step for {len(self.devices)} x {self.devices[0].device_kind}'
        train = pool.submit(_compiled, program.lower_train_step(), f'train {where}')
        evaluation = pool.submit(_compiled, lower_eval_step(program), f'eval {where}') if with_eval else None
        concurrent.futures.wait([f for f in (train, evaluation) if f])
    flops = mfu.flops_per_token(c.model, c.row_tokens) * c.row_tokens
    rows = evaluate.batch_size(mesh, c.eval.batch_size or c.train.batch_size)
    result = self.read(program, *train.result(), flops * c.train.batch_size, c.row_tokens * c.train.batch_size)
    result['saving_bytes'] = saving(program)
    result['fits'] &= result['saving_bytes'] <= self.chip.hbm
    if evaluation:  # forward alone: a third; the optimizer's state stays where it is meanwhile
      beside = held(program.abstract_state().opt_state)
      result['eval'] = self.read(program, *evaluation.result(), flops / 3 * rows, c.row_tokens * rows, beside)
      result['fits'] &= result['eval']['fits']
    return result

  def read(self, program: Program, compiled, text: str, seconds: float, model_flops: float, tokens: int,
           beside: int = 0) -> dict[str, Any]:
    """What a compiled step is and takes, or why it was refused. beside: bytes that a device holds for others."""
    limit = self.chip.hbm
    if isinstance(compiled, OutOfMemory):
      return {'hbm_bytes_per_chip': compiled.needed, 'hbm_limit': limit, 'fits': False, 'refusal': str(compiled),
              'compile_seconds': seconds}
    memory, counted = compiled.memory_analysis(), compiled.cost_analysis()
    made = hlo.parse(text)
    config, mesh = program.config, program.mesh
    slice_of = [getattr(d, 'slice_index', None) or 0 for d in mesh.devices.flat]
    done = roofline.work(made, self.chip, mfu.visible_keys(config.model, config.row_tokens), slice_of)
    times = roofline.estimate(done, self.chip)
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = (memory.argument_size_in_bytes + memory.temp_size_in_bytes + new + memory.generated_code_size_in_bytes
             + beside)
    return {
        'hbm_bytes_per_chip': total, 'hbm_limit': limit, 'fits': total <= limit,
        'argument_bytes': memory.argument_size_in_bytes, 'temp_bytes': memory.temp_size_in_bytes, 'output_bytes': new,
        'code_bytes': memory.generated_code_size_in_bytes,
        'host_bytes': memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
        'flops': done.flops, 'kernel_flops': done.kernel_flops, 'model_flops': model_flops, 'bytes': done.hbm_bytes,
        'compiler_flops': counted['flops'], 'compiler_bytes': counted['bytes accessed'],
        'collectives': costs.by_kind(costs.collectives(made, mesh.size)),
        'fusions': sum(i.opcode == 'fusion' for c in made.computations.values() for i in c.values()),
        'not_counted': list(done.unknown),
        'roofline': times | roofline.speed(model_flops, tokens, mesh.size, self.chip, times['step_seconds']),
        'compile_seconds': seconds}


def libtpu() -> str:
  """The version of the compiler, which the numbers depend on."""
  try:
    return importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError:  # the module comes from another package, such as a nightly build
    return 'unknown'


def held(state) -> int:
  """Bytes of (a part of) an abstract state on one device."""
  return sum(row.held for row in shards.rows(state))


def saving(program: Program) -> int:
  """Bytes on one device while the state is saved or restored, which no setting but mesh and loop changes.

  Of stacked layers there is a copy beside it, in the layout of checkpoints.
  """
  layouts = [program] if program.config.model.loop == 'unrolled' else [program, program.canonical()]
  return sum(held(p.abstract_state()) for p in layouts)


def lower_eval_step(program: Program):
  """The evaluation step of a batch, traced and lowered."""
  c = program.config
  batch = program.abstract_batch(evaluate.batch_size(program.mesh, c.eval.batch_size or c.train.batch_size))
  if c.model.reads_text:  # evaluation counts the bytes of text, too
    batch['bytes'] = batch['targets']
  state = program.abstract_state()
  with sharding.use(program.mesh):
    return program.eval_step().lower(state.params, batch, state.step)


class OutOfMemory(Exception):
  """The compiler's refusal of a program that needs more memory than a chip has."""

  def __init__(self, text: str):
    super().__init__(text.splitlines()[0])
    found = re.search(r'Used ([\d.]+)([KMGT]?) of|\(([\d.]+)([KMGT]?)\) exceeds', text)
    number, unit = (found[1] or found[3], found[2] or found[4]) if found else ('nan', '')
    self.needed = float(number) * 1024 ** ' KMGT'.index(unit or ' ')


def _compiled(lowered, what: str) -> tuple[Any, str, float]:
  """(compiled, or why there is not enough memory; its text; seconds).

  The compiler writes the text itself: `as_text` of libtpu 0.0.52 fails on programs for v6e and v7x that have an
  asynchronous update of several operands.

  Raises UserError when the compiler fails on `what`.
  """
  start = time.perf_counter()
  with tempfile.TemporaryDirectory() as folder:
    try:
      compiled, text = lowered.compile({'xla_dump_to': folder, 'xla_dump_hlo_as_text': True}), ''
    except jax.errors.JaxRuntimeError as e:
      if 'RESOURCE_EXHAUSTED' not in str(e):
        raise UserError(f'libtpu {libtpu()} fails to compile the {what}: {_first_line(e)}; '
                        'another topology, mesh or libtpu may do.') from e
      compiled, text = OutOfMemory(str(e)), ''
    seconds = time.perf_counter() - start
    for path in pathlib.Path(folder).glob('*.after_codegen.txt'):
      text = path.read_text()
  if not (text or isinstance(compiled, OutOfMemory)):  # another libtpu may name it differently
    text = compiled.as_text()
  return compiled, text, seconds


def _first_line(error: Exception) -> str:
  return str(error).splitlines()[0]


@contextlib.contextmanager
def alive(what: str, every: float = 5.0):
  """Says on stderr, in one line, for how long something has been at work that tells nothing itself."""
  over, start = threading.Event(), time.perf_counter()
  def tick():
    while not over.wait(every):
      print(f'\r{what}: {time.perf_counter() - start:.0f} s', end='', file=sys.stderr, flush=True)
  thread = threading.Thread(target=tick, daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()
    print(f'\r{what}: {time.perf_counter() - start:.0f} s', file=sys.stderr, flush=True)
