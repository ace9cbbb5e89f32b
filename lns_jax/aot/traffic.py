"""Bytes between the instructions of a compiled program and the main memory of its device."""

import math

from lns_jax.aot.hlo import Array, Computation, Instruction, Program

# These move nothing, or name what others move.
FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call', 'conditional', 'after-all',
        'async-start', 'partition-id', 'replica-id', 'opt-barrier', 'add-dependency')
SLICES = ('dynamic-slice', 'slice', 'gather')
# Targets of custom calls that name a buffer without moving it.
BUFFERS = ('AllocateBuffer', 'AsyncCollectiveStart', 'AsyncCollectiveDone', 'ConcatBitcast')


def hbm_bytes(program: Program, instruction: Instruction, computation: Computation) -> float:
  """Bytes that an instruction, run once, reads from main memory and writes to it.

  Of an operand that is only sliced the slice counts, of one that is updated in place the update; values in a TPU's
  vector memory (space 1) cost nothing. Padding of tiles, and what a kernel reads more than once, are not seen.
  """
  if instruction.opcode in FREE or instruction.opcode.endswith(('-done', '-update')):
    return 0
  return _read(program, instruction, computation) + _written(program, instruction, computation)


def _main(arrays: tuple[Array, ...]) -> int:
  return sum(a.nbytes for a in arrays if a.space == 0)


def _inside(program: Program, fusion: Instruction) -> Computation:
  return program.computations[fusion.attribute('calls')]


def _read(program: Program, instruction: Instruction, computation: Computation) -> float:
  operands = [_main(computation[name].arrays) for name in instruction.operands]
  opcode = instruction.opcode.removesuffix('-start')
  if instruction.attribute('custom_call_target') in BUFFERS:
    return 0
  if opcode in SLICES:
    return min(operands[0], _made(instruction)) + sum(operands[1:])
  if opcode == 'dynamic-update-slice':
    return sum(operands[1:])
  if opcode != 'fusion':
    return sum(operands)
  inner = _inside(program, instruction)
  parameters = sorted((i for i in inner.values() if i.opcode == 'parameter'), key=lambda i: int(i.argument))
  return sum(min(n, _used(inner, p.name)) for n, p in zip(operands, parameters) if n)


def _made(instruction: Instruction) -> int:
  """Bytes of the slice that a `slice` makes, or a `slice-start`, which names its operand before it."""
  return instruction.arrays[1 if instruction.opcode.endswith('-start') else 0].nbytes


def _used(inner: Computation, name: str) -> float:
  """Bytes that a fusion reads of its parameter: those of its slices where it is only sliced, else all (infinite)."""
  total = 0
  for user in (i for i in inner.values() if name in i.operands):
    if user.opcode == 'bitcast':
      total += _used(inner, user.name)
    elif user.opcode in SLICES and user.operands[0] == name:
      total += user.arrays[0].nbytes
    elif not (user.opcode == 'dynamic-update-slice' and user.operands[0] == name
              or user.attribute('custom_call_target') in BUFFERS):
      return math.inf
  return total


def _written(program: Program, instruction: Instruction, computation: Computation) -> int:
  if instruction.opcode == 'fusion':
    inner = _inside(program, instruction)
    root = next(i for i in inner.values() if i.is_root)
    made = [inner[n] for n in root.operands] if root.opcode == 'tuple' else [root]
    if len(made) != len(instruction.arrays):  # a single one that makes a tuple, such as a start
      return 0 if root.attribute('custom_call_target') in BUFFERS else _main(instruction.arrays)
    return sum(_new(inner, m) for a, m in zip(instruction.arrays, made) if a.space == 0)
  if instruction.opcode.endswith('-start'):
    operands = sum(_main(computation[name].arrays) for name in instruction.operands)
    return max(0, _main(instruction.arrays) - operands)
  return _new(computation, instruction) if instruction.arrays and instruction.arrays[0].space == 0 else 0


def _new(computation: Computation, instruction: Instruction) -> int:
  """Bytes that are written of what an instruction makes: of one that updates in place, those of the update."""
  while instruction.opcode == 'bitcast':
    instruction = computation[instruction.operands[0]]
  if instruction.opcode == 'dynamic-update-slice':
    return _main(computation[instruction.operands[1]].arrays)
  passes = instruction.opcode == 'parameter' or instruction.attribute('custom_call_target') in BUFFERS
  return 0 if passes else _main(instruction.arrays)
