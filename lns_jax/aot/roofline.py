"""An estimate of a compiled program's time on a chip, from what its instructions compute, move and send."""

import dataclasses
import math

from lns_jax.aot import costs, traffic
from lns_jax.aot.hlo import Program
from lns_jax.train.chips import Chip

FORMULA = (
    'step_seconds = max(busy, network): busy is the sum over instructions of max(FLOPs / peak, bytes / memory rate), '
    'network that of what a chip sends in rings over all of its links, and hands to other slices. Every instruction '
    'runs at full rate and every collective hides behind computing; of serial_seconds = busy + network none does. '
    'Elementwise work, latencies and input count nothing: a bound, not a measurement.')


@dataclasses.dataclass
class Work:
  """Totals of a step on one device: FLOPs, bytes of main memory, seconds in which it computes or moves, bytes sent."""

  flops: float = 0.0
  kernel_flops: float = 0.0  # the part of `flops` that is kernels', by formula
  hbm_bytes: float = 0.0
  busy_seconds: float = 0.0
  ici_bytes: float = 0.0
  dcn_bytes: float = 0.0
  unknown: tuple[str, ...] = ()  # kernels of unknown FLOPs, loops of unknown length


def work(program: Program, chip: Chip, keys: float, slice_of: list[int]) -> Work:
  """What the program does in one run.

  Args:
    keys: visible to a query on average, for the FLOPs of attention kernels.
    slice_of: the slice of each device, in the mesh's order.
  """
  done, unknown = Work(), set()
  for i, computation, times in program.executed():
    flops = costs.flops(program, i, computation)
    if i.opcode == 'custom-call' and i.attribute('custom_call_target') == costs.KERNEL:
      try:
        flops = costs.kernel_flops(i, computation, keys)
        done.kernel_flops += times * flops
      except KeyError:
        unknown.add(i.name)
    elif i.opcode == 'while' and program.trips(i, computation) is None:
      unknown.add(i.name)
    moved = traffic.hbm_bytes(program, i, computation)
    done.flops += times * flops
    done.hbm_bytes += times * moved
    done.busy_seconds += times * max(flops / chip.tflops / 1e12, moved / chip.hbm_rate)
  for c in costs.collectives(program, len(slice_of)):
    if not c.groups or any(len({slice_of[n] for n in group}) > 1 for group in c.groups):
      done.dcn_bytes += c.times * c.sent
    else:
      done.ici_bytes += c.times * c.sent
  done.unknown = tuple(sorted(unknown))
  return done


def estimate(done: Work, chip: Chip) -> dict[str, float]:
  """Seconds of a step by part, and `step_seconds` and `serial_seconds` as FORMULA says."""
  network = done.ici_bytes / chip.ici + done.dcn_bytes / chip.dcn
  return {'compute_seconds': done.flops / chip.tflops / 1e12, 'memory_seconds': done.hbm_bytes / chip.hbm_rate,
          'busy_seconds': done.busy_seconds, 'ici_seconds': done.ici_bytes / chip.ici,
          'dcn_seconds': done.dcn_bytes / chip.dcn, 'step_seconds': max(done.busy_seconds, network),
          'serial_seconds': done.busy_seconds + network}


def speed(model_flops: float, tokens: float, chips: int, chip: Chip, seconds: float) -> dict[str, float]:
  """Share of the chips' peak that `model_flops` in `seconds` are, and tokens per second of all chips together."""
  if not seconds:
    return {'mfu': math.nan, 'tokens_per_second': math.nan}
  return {'mfu': model_flops / (chips * chip.tflops * 1e12 * seconds), 'tokens_per_second': tokens / seconds}
