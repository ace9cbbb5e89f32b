"""What the texts of programs say."""

import collections
import re

import numpy as np


def constants(stablehlo: str, n: int) -> list[np.ndarray]:
  """Constant float32 vectors of length n of a StableHLO text, printed as a list or as hex."""
  found = []
  for body in re.findall(rf'dense<(.*?)> : tensor<{n}xf32>', stablehlo):
    if body.startswith('"0x'):
      found.append(np.frombuffer(bytes.fromhex(body[3:-1]), np.float32))
    elif body.startswith('['):
      found.append(np.array(body.strip('[]').split(','), np.float32))
  return found


def collectives(text: str) -> collections.Counter:
  """(kind, shapes) of every collective of a compiled program."""
  kinds = 'all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter|collective-broadcast'
  return collections.Counter(re.findall(rf'= (.*?) ({kinds})(?:-start)?\(', text))
