"""What the depth measures found: as plain JSON values, and as files that a later run can go on from."""

import json
import pathlib

import numpy as np

from lns_jax import files
from lns_jax.config import ModelConfig
from lns_jax.depth.estimate import Estimate

PARTS = ('value', 'low', 'high')


def make(model: str, config: ModelConfig, found: dict) -> dict:
  """{'model', 'layers', 'layer_ids', 'tokens', measure: values, 'intervals': {measure: {'low', 'high'}}}.

  'variance' [L + 1], 'angular' L x L with angular[n - 1][l - 1] and null where l + n > L + 1, 'layer_drop' [L]
  in nats per token, 'block_influence' [L], 'baseline' []; intervals are 95 % over sequences.

  Args:
    found: name -> Estimate, or a plain value. 'tokens' are those of the variance, 0 without it.
  """
  values, intervals = {}, {}
  for name, value in found.items():
    number = value.value if isinstance(value, Estimate) else value
    values[name] = files.finite(number)
    if isinstance(value, Estimate):
      intervals[name] = {'low': files.finite(value.low), 'high': files.finite(value.high)}
  tokens = found['variance'].tokens if 'variance' in found else 0
  return {'model': model, 'layers': config.num_layers, 'layer_ids': list(config.layer_ids), 'tokens': int(tokens),
          **values, 'intervals': intervals}


def save(path: pathlib.Path, found: dict, about: dict):
  """Writes what one measure found, and what it was taken on, to an .npz file: whole or not at all."""
  arrays, plain, tokens = {}, {}, {}
  for name, value in found.items():
    if isinstance(value, Estimate):
      arrays |= {f'{name}.{part}': getattr(value, part) for part in PARTS}
      tokens[name] = value.tokens
    elif isinstance(value, np.ndarray):
      arrays[name] = value
    else:
      plain[name] = files.finite(value)
  head = json.dumps({'about': about, 'tokens': tokens, 'plain': plain, 'arrays': sorted(arrays)})
  with files.whole(path, 'wb') as file:
    np.savez_compressed(file, head=np.array(head), **arrays)


def load(path: pathlib.Path) -> tuple[dict, dict] | None:
  """(found, about) as `save` wrote them; None where there is no such file, or a damaged one."""
  try:
    with np.load(path) as saved:
      head = json.loads(str(saved['head']))
      arrays = {name: saved[name] for name in head['arrays']}
    found = {name: Estimate(*(arrays.pop(f'{name}.{part}') for part in PARTS), tokens)
             for name, tokens in head['tokens'].items()}
    return found | arrays | head['plain'], head['about']
  except Exception:  # what a damaged .npz file raises depends on which of its bytes is wrong
    return None
