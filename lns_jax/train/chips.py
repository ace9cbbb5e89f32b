"""TPU chips: what they can do, and the shapes in which they are lent."""

import dataclasses
import functools
import itertools
import math

from lns_jax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device as JAX sees it, which of v7x is half a chip. From the vendor's pages, but `hbm`."""

  kinds: tuple[str, ...]  # JAX's device_kind
  tflops: float  # dense bf16
  hbm: float  # bytes that the compiler lets a program have, as its refusals name them
  hbm_rate: float  # bytes/s
  ici: float  # bytes/s that it can send over all of its links to other chips of its slice
  dcn: float  # bytes/s, its share of what leaves its host for other slices
  axes: int  # dimensions of a slice
  most: int  # chips of the largest slice that can be asked for
  library: str = ''  # the name that libtpu has for it, if another
  options: tuple[tuple[str, str], ...] = ()  # of the topology


GIB = 2**30
CHIPS = {
    'v4': Chip(('TPU v4',), 275, 30.75 * GIB, 1.2e12, 300e9, 6.25e9, 3, 4096,
               options=(('chip_config_name', 'megacore'),)),
    'v5e': Chip(('TPU v5 lite', 'TPU v5e'), 197, 15.75 * GIB, 819e9, 200e9, 3.125e9, 2, 256),
    'v5p': Chip(('TPU v5p', 'TPU v5'), 459, 95.73 * GIB, 2765e9, 600e9, 6.25e9, 3, 6144),
    'v6e': Chip(('TPU v6 lite', 'TPU v6e'), 918, 31.24 * GIB, 1638e9, 400e9, 12.5e9, 2, 256),
    'v7x': Chip(('TPU7x',), 1153.5, 94.74 * GIB, 3690e9, 300e9, 6.25e9, 3, 9216, library='tpu7x'),
}
PLANES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
GCLOUD = {'v5litepod': ('v5e', 1), 'v5e': ('v5e', 1), 'v6e': ('v6e', 1), 'v4': ('v4', 2), 'v5p': ('v5p', 2)}  # per chip
SMALL_BOXES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@functools.cache
def shapes(name: str) -> tuple[tuple[int, ...], ...]:
  """Shapes of a slice that the chip is lent in, the smallest first: of three axes, cubes of 64 chips from there on."""
  chip = CHIPS[name]
  if chip.axes == 2:
    return PLANES
  cubes = [s for s in itertools.combinations_with_replacement(range(4, 28, 4), 3) if math.prod(s) <= chip.most]
  return (*SMALL_BOXES, *sorted(cubes, key=math.prod))


def parse(topology: str) -> tuple[str, tuple[int, ...]]:
  """'v5e:4x4' -> ('v5e', (4, 4)). Raises UserError for what is not lent, with the nearest that is."""
  name, _, shape = topology.partition(':')
  kind, _, number = name.partition('-')
  if name not in CHIPS and kind in GCLOUD and number.isdecimal() and len(number) < 6:
    name, each = GCLOUD[kind]
    same = min(shapes(name), key=lambda s: abs(math.prod(s) * each - int(number)))
    raise UserError(f"--topology={topology} is gcloud's name of a machine; a topology is a chip and a shape, here "
                    f"{name}:{'x'.join(map(str, same))}.")
  if name not in CHIPS:
    raise UserError(f'--topology={topology}: there is no chip {name!r}.{nearest(name, CHIPS)}')
  sizes = shape.split('x')
  numbers = tuple(map(int, sizes)) if all(s.isdecimal() and len(s) < 6 for s in sizes) else ()
  known = shapes(name)
  if numbers in known:
    return name, numbers
  count = math.prod(numbers) if numbers else 1
  distance = lambda s: (sorted(s) != sorted(numbers), abs(math.log(math.prod(s) / max(count, 1))))
  near = sorted(known, key=distance)[:3]
  forms = ', '.join(f'{name}:{"x".join(map(str, s))}' for s in near)
  raise UserError(f'--topology={topology}: {name} is not lent in the shape {shape!r}; the nearest are {forms}.')
