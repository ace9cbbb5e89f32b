"""What can be reproduced: tables and figures by name, and the scales of each."""

import importlib

from lns_jax.errors import UserError, nearest

# {item: (module, {scale: what it is})}. Modules are imported at use, so that --help is quick.
ITEMS = {
    'schemes': ('lns_jax.reproduce.schemes', {
        'cpu': "every scheme with the quickstart's budget", 'tiny': 'a smoke test of the same shape',
        'tpu': "LLaMA-130M with the paper's settings; needs C4"}),
}


def check(item: str, scale: str):
  """Refuses an item or a scale that does not exist."""
  if item not in ITEMS:
    raise UserError(f'--item={item} is not known.{nearest(item, ITEMS)}')
  scales = ITEMS[item][1]
  if scale not in scales:
    raise UserError(f'--item={item} has no scale {scale!r}.{nearest(scale, scales)}')


def reproduce(item: str, scale: str, workdir: str, **settings) -> dict:
  """Makes one item in workdir; returns the last line of the command."""
  check(item, scale)
  return importlib.import_module(ITEMS[item][0]).reproduce(scale, workdir, **settings)
