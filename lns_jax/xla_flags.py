"""Compiler flags by TPU chip to try, off unless --xla_flags=untimed asks for them; set before jax starts.

No advice: we have timed none on a chip. The values are those that others train with: of vector memory Marin on all
three chips and MaxText on v6e, of split products MaxText. libtpu refuses what it does not know; 0.0.42.1, 0.0.50.1
and 0.0.52 take them. docs/tpu.md has what they do to compiled programs, and says how to compare.
"""

import os
import pathlib

from lns_jax.errors import UserError, nearest

VARIABLE = 'LIBTPU_INIT_ARGS'  # read by libtpu alone: on a CPU or GPU they are nothing
VMEM = 'Vector memory that a single operation may use; what is left holds what is fetched ahead for later ones.'
WHOLE = ('MiB from which a product with split weights is cut into one for each share, which passes over its whole sum '
         'every time: never. The weights are gathered first instead, as without the flag on 64 chips and more.')


def _flags(vmem_kib: int) -> dict[str, tuple[str, str]]:
  return {'xla_tpu_scoped_vmem_limit_kib': (str(vmem_kib), VMEM),
          'xla_jf_spmd_threshold_for_windowed_einsum_mib': ('1000000', WHOLE)}


# chip -> {flag: (value, reason)}
FLAGS = {'v5e': _flags(50_000), 'v5p': _flags(50_000), 'v6e': _flags(98_304)}

_PCI = {'0x005e': 'v4', '0x0062': 'v5p', '0x0063': 'v5e', '0x006f': 'v6e'}  # device ids of vendor 0x1ae0


def chip(devices: pathlib.Path = pathlib.Path('/sys/bus/pci/devices')) -> str:
  """The kind of TPU in this machine, such as 'v5e'; empty where there is none that is known. Does not wake it."""
  for vendor in sorted(devices.glob('*/vendor')):
    if vendor.read_text().strip() == '0x1ae0':
      return _PCI.get(vendor.with_name('device').read_text().strip(), '')
  return ''


def use(choice: str, found: str | None = None) -> list[str]:
  """Adds flags to LIBTPU_INIT_ARGS and returns them; a user's own value of the same flag stays.

  Args:
    choice: 'none'; 'untimed', those of the chip that is here; or a chip of the table.
    found: the chip that is here; default: `chip()`.

  Raises UserError for a chip that is not in the table.
  """
  if choice == 'none':
    return []
  name = (chip() if found is None else found) if choice == 'untimed' else choice
  if choice != 'untimed' and choice not in FLAGS:
    raise UserError(f'--xla_flags={choice} is not known.{nearest(choice, ["none", "untimed", *FLAGS])}')
  given = os.environ.get(VARIABLE, '')
  own = {word.lstrip('-').partition('=')[0] for word in given.split()}
  added = [f'--{flag}={value}' for flag, (value, _) in FLAGS.get(name, {}).items() if flag not in own]
  if added:
    os.environ[VARIABLE] = ' '.join([*given.split(), *added])
  return added
