"""What a compiled program does on one device: FLOPs and collectives, each loop's body as often as it turns.

The compiler's own count (`cost_analysis`) holds the body of a loop once, which of a scanned model is one layer of L,
and no kernel. So the instructions of the compiled text are counted here: matrix products by the compiler's formulas for
`dot` and `convolution` (of a padded or dilated one those multiplications alone that meet an entry), everything else, a
few percent, not at all. The text, because it is what runs: after partitioning, with what remat computes again, and with
what every device computes for itself.
"""

import dataclasses
import math
import re

import numpy as np

from lns_jax.aot.hlo import Computation, Instruction, Program

COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
KERNEL = 'tpu_custom_call'  # the target of a Pallas kernel
# Matrix products of a kernel for each pair of a query and a key that it sees: the backward ones compute scores anew.
KERNEL_PRODUCTS = {'splash_mha_fwd': 2, 'splash_mha_dq': 3, 'splash_mha_dkv': 4}


def flops(program: Program, instruction: Instruction, computation: Computation) -> int:
  """FLOPs of the matrix products of an instruction, run once; 0 of a kernel."""
  if instruction.opcode == 'dot':
    return dot_flops(instruction, computation)
  if instruction.opcode == 'convolution':
    return convolution_flops(instruction, computation)
  if instruction.opcode == 'fusion':
    inner = program.computations[instruction.attribute('calls')]
    return sum(flops(program, i, inner) for i in inner.values())
  return 0


def dot_flops(instruction: Instruction, computation: Computation) -> int:
  """Two for each entry of the product and each contracted index."""
  left = computation[instruction.operands[0]].arrays[0]
  contracted = math.prod(left.dims[n] for n in instruction.numbers('lhs_contracting_dims'))
  return 2 * instruction.arrays[0].size * contracted


def convolution_flops(instruction: Instruction, computation: Computation) -> int:
  """Two for each multiplication with an entry of the left operand: neither padding nor holes of a dilation count."""
  left, right = (computation[name].arrays[0] for name in instruction.operands)
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
  window = _window(instruction)
  size = lambda array, side, label: array.dims[labels[side].index(label)]
  positions = 1
  for axis in range(len(labels[1]) - 2):
    n = str(axis)
    positions *= _meetings(size(left, 1, n), size(instruction.arrays[0], 3, n), {k: v[axis] for k, v in window.items()})
  groups = int(instruction.attribute('batch_group_count') or 1)
  return 2 * positions * size(left, 1, 'b') // groups * size(right, 2, 'i') * size(right, 2, 'o')


def _window(instruction: Instruction) -> dict[str, list]:
  """Size, stride, padding in front and dilations of each spatial axis."""
  text = re.search(r'window=\{([^}]*)\}', instruction.attributes)
  given = dict(part.split('=') for part in text[1].split()) if text else {}
  sizes = [int(n) for n in given['size'].split('x')] if 'size' in given else []
  of = lambda name: [int(n) for n in given[name].split('x')] if name in given else [1] * len(sizes)
  pads = [int(p.split('_')[0]) for p in given['pad'].split('x')] if 'pad' in given else [0] * len(sizes)
  return {'size': sizes, 'stride': of('stride'), 'pad': pads, 'lhs_dilate': of('lhs_dilate'),
          'rhs_dilate': of('rhs_dilate')}


def _meetings(inputs: int, outputs: int, window: dict[str, int]) -> int:
  """Pairs of an output position and a window position that meet an entry of the input."""
  at = (np.arange(outputs)[:, None] * window['stride'] - window['pad']
        + np.arange(window['size'])[None] * window['rhs_dilate'])
  index, hole = np.divmod(at, window['lhs_dilate'])
  return int(np.sum((hole == 0) & (index >= 0) & (index < inputs)))


def kernel_flops(instruction: Instruction, computation: Computation, keys: float) -> float:
  """FLOPs of a call of an attention kernel, by formula: 2 for each product, entry of its queries and visible key.

  keys: visible to a query on average. Raises KeyError for a kernel of another name.
  """
  products = next((n for name, n in KERNEL_PRODUCTS.items() if instruction.name.startswith(name)), None)
  if products is None:
    raise KeyError(instruction.name)
  # Queries [B, H, T, h], or [H, T, h] of one row, come first behind numbers of blocks. Results are no measure: keys
  # have fewer heads, or are more than a device's share.
  operands = (computation[name].arrays[0] for name in instruction.operands)
  return 2 * products * keys * next(a.size for a in operands if a.dtype in ('bf16', 'f32'))


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of the program: its kind, times that it runs, the bytes of it on a device, and who takes part."""

  kind: str
  times: int
  nbytes: int  # of its larger side: what it gathers, sums or passes on
  groups: tuple[tuple[int, ...], ...]  # numbers of devices in the mesh's order; of a permute (from, to); () over slices

  @property
  def sent(self) -> float:
    """Bytes that a device sends each time, by rings: twice (n-1)/n of a sum, once of a gather or a scatter."""
    if self.kind == 'collective-permute' or not self.groups:
      return self.nbytes
    n = len(self.groups[0])
    return (2 if self.kind == 'all-reduce' else 1) * (n - 1) / n * self.nbytes


def collectives(program: Program, devices: int) -> list[Collective]:
  """All collectives. Those of one channel in fusions are the steps of a single one, which runs beside products.

  devices: number of them in the mesh.
  """
  found, seen = [], set()
  for i, computation, times in program.executed():
    between = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes) if i.opcode == 'send' else None
    if between:  # slices exchange through their hosts, which are handed the array
      kind = between[1].lower().replace('_', '-')
      found.append(Collective(f'{kind} over slices', times, i.arrays[0].nbytes, ()))
      continue
    inside = program.computations[i.attribute('calls')] if i.opcode == 'fusion' else computation
    for c in inside.values() if i.opcode == 'fusion' else (i,):
      kind = c.opcode.removesuffix('-start')
      if kind not in COLLECTIVES:
        continue
      nbytes = _larger_side(c, inside)
      step = id(computation), kind, c.attribute('channel_id'), nbytes
      if i.opcode != 'fusion' or step not in seen:
        found.append(Collective(kind, times, nbytes, groups(c, devices)))
      if i.opcode == 'fusion':  # outside, those of several calls may share a channel
        seen.add(step)
  return found


def _larger_side(collective: Instruction, computation: Computation) -> int:
  taken = sum(a.nbytes for name in collective.operands for a in computation[name].arrays)
  made = sum(a.nbytes for a in collective.arrays if a.dims or len(collective.arrays) == 1)
  if collective.opcode.endswith('-start') and collective.opcode != 'all-reduce-start':
    made -= taken  # such a start names what it takes beside what it makes
  return max(taken, made)


def groups(collective: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
  """Who exchanges with whom, in any of the three forms that programs have it in."""
  text = collective.attributes
  listed = re.search(r'(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}', text)
  if listed:
    return tuple(tuple(int(n) for n in g.split(',')) for g in re.findall(r'\{([\d,]+)\}', listed[1]))
  counted = re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if counted:
    dims = [int(n) for n in counted[3].split(',')]
    order = [int(n) for n in counted[4].split(',')] if counted[4] else range(len(dims))
    return _rows(np.arange(math.prod(dims)).reshape(dims).transpose(order), int(counted[2]))
  named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text)
  if named:
    axes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
    over = re.findall(r"'(\w+)'", named[2])
    order = [list(axes).index(a) for a in [*(a for a in axes if a not in over), *over]]
    ids = np.arange(math.prod(axes.values())).reshape(list(axes.values())).transpose(order)
    return _rows(ids, math.prod(axes[a] for a in over))
  return (tuple(range(devices)),)


def _rows(ids: np.ndarray, size: int) -> tuple[tuple[int, ...], ...]:
  return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def by_kind(found: list[Collective]) -> dict[str, dict[str, int]]:
  """{kind: {'count', 'bytes'}}: times that a device takes part, and bytes of the larger side, over the whole step."""
  totals = {}
  for c in found:
    total = totals.setdefault(c.kind, {'count': 0, 'bytes': 0})
    total['count'] += c.times
    total['bytes'] += c.times * c.nbytes
  return totals
