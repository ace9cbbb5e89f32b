"""Decoding with a cache against transformers' generate, in turn, on the same processors.

  python benchmarks/decode.py --peer_python=DIR/bin/python [--rounds=5] [--batches=1,8]

A Llama of SmolLM2-135M's shape (30 layers, D 576, F 1536, 9 heads of 3 keys, vocabulary 49152, tied), random weights,
float32, a prompt of 32 tokens, greedy. Both sides are processes that load once and then take turns; only one of them
works at a time. Ends with one JSON line: for each batch size the median milliseconds of a step of both, the median and
the spread of peer / ours over the rounds (above 1: we are faster), and the load of the machine before and after.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys

from absl import flags

from lns_jax import cli
from lns_jax.errors import UserError

PEER_PYTHON = flags.DEFINE_string('peer_python', '', 'A Python that has torch and transformers; empty: ours alone.')
ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns of each side.', lower_bound=1)
BATCHES = flags.DEFINE_list('batches', ['1', '8'], 'Rows at a time.')
NEW = flags.DEFINE_integer('new', 64, 'Tokens of a turn, after the first.', lower_bound=1)


class Side:
  """A process that answers a batch size with the seconds of each step of one turn."""

  def __init__(self, python: str, script: str):
    command = [python, str(pathlib.Path(__file__).with_name(script)), str(NEW.value)]
    self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    self._name = script

  def turn(self, rows: int) -> float:
    """Median seconds of a step."""
    print(rows, file=self._process.stdin, flush=True)
    line = self._process.stdout.readline()
    if not line:
      raise UserError(f'{self._name} ended with code {self._process.wait()}; its error stands above.')
    return statistics.median(json.loads(line))

  def close(self):
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()


def measure(sides: dict[str, Side], rows: int) -> dict:
  """Milliseconds and ratios at one batch size; the first turn of each is not counted."""
  for side in sides.values():
    side.turn(rows)
  seconds = {name: [] for name in sides}
  for number in range(ROUNDS.value):
    for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
      seconds[name].append(sides[name].turn(rows))
    shown = ', '.join(f'{name} {1e3 * s[-1]:.1f} ms' for name, s in seconds.items())
    print(f'batch {rows}, round {number + 1}: {shown}', file=sys.stderr, flush=True)
  found = {f'{name}_ms': 1e3 * statistics.median(s) for name, s in seconds.items()}
  if 'peer' in seconds:
    ratios = [peer / ours for peer, ours in zip(seconds['peer'], seconds['ours'])]
    found |= {'peer_over_ours': statistics.median(ratios), 'lowest': min(ratios), 'highest': max(ratios)}
  return found


def main():
  sizes, before = cli.integers('batches', BATCHES.value), os.getloadavg()[0]
  sides = {'ours': Side(sys.executable, 'decode_ours.py')}
  if PEER_PYTHON.value:
    sides['peer'] = Side(PEER_PYTHON.value, 'decode_peer.py')
  found = {f'batch_{rows}': measure(sides, rows) for rows in sizes}
  for side in sides.values():
    side.close()
  return found | {'load_before': before, 'load_after': os.getloadavg()[0], 'cores': len(os.sched_getaffinity(0))}


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
