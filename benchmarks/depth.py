"""Depth measures against plain forward passes over the same rows, in turn, in one process; and against the paper's way.

  python benchmarks/depth.py [--rounds=3] [--peer_python=DIR/bin/python]

A Llama of 30 layers and 135M parameters (D 576, F 1536, 9 heads of 3 keys, vocabulary 49152, random weights), 32
rows of 512 tokens, float32. Ends with one JSON line: medians over the rounds of the time of all angular distances
(with every other state measure) and of all 30 removals, in units of one plain forward pass, and the FLOPs of the
removals in the same unit. With --peer_python also the paper's procedure in torch on --peer_rows rows: one forward pass
a distance and row, one model a removed layer (paper.md 6.8), against ours on the same rows.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import time

from absl import flags

from lns_jax import cli
from lns_jax.errors import UserError

ROUNDS = flags.DEFINE_integer('rounds', 3, 'Rounds of one plain pass and each measure.', lower_bound=1)
ROWS = flags.DEFINE_integer('rows', 32, 'Rows.', lower_bound=1)
SEQ_LEN = flags.DEFINE_integer('seq_len', 512, 'T.', lower_bound=2)
BATCH = flags.DEFINE_integer('batch', 8, 'Rows at a time.', lower_bound=1)
LAYERS = flags.DEFINE_integer('layers', 30, 'L.', lower_bound=2)
PEER_PYTHON = flags.DEFINE_string('peer_python', '', 'A Python that has torch and transformers.')
PEER_ROWS = flags.DEFINE_integer('peer_rows', 2, "Rows of the paper's procedure.", lower_bound=1)


def model():
  """The config of the benchmark."""
  from lns_jax.config import ModelConfig
  return ModelConfig(vocab_size=49152, d_model=576, d_ff=1536, num_layers=LAYERS.value, num_heads=9, num_kv_heads=3,
                     tie_embeddings=True, precision='float32', loop='scan')


def batches(rows: int, size: int) -> list[dict]:
  """Random rows of one document each."""
  import numpy as np
  ids = np.random.default_rng(0).integers(0, 49152, (rows, SEQ_LEN.value + 1), np.int32)
  every = {'tokens': ids[:, :-1], 'targets': ids[:, 1:], 'segment_ids': np.ones_like(ids[:, 1:])}
  return [{k: v[i:i + size] for k, v in every.items()} for i in range(0, rows, size)]


def removal_passes(config) -> float:
  """FLOPs of the whole model and of all removals with reused prefixes, over those of one plain forward pass."""
  from lns_jax.train import mfu
  flops = lambda L: mfu.flops_per_token(dataclasses.replace(config, num_layers=L, layer_ids=(), depth=0), SEQ_LEN.value)
  L, layer = config.num_layers, flops(2) - flops(1)
  head = flops(1) - layer
  return ((L + L * (L - 1) / 2) * layer + (L + 1) * head) / flops(L)


def timed(work) -> float:
  start = time.perf_counter()
  work()
  return time.perf_counter() - start


def ways(config, params, rows: list[dict]) -> dict:
  """Name -> one pass of it over the rows."""
  import jax

  import lns_jax
  forward = jax.jit(functools.partial(lns_jax.forward, config))
  def plain():
    for b in rows:
      forward(params, b['tokens'], segment_ids=b['segment_ids']).block_until_ready()
  return {'plain': plain, 'angular': lambda: lns_jax.depth.profile(config, params, rows),
          'removal': lambda: lns_jax.depth.layer_drop(config, params, rows)}


def peer(config, params) -> dict:
  """The paper's procedure in torch against ours, on the same few rows, each after a run that is not counted."""
  rows = batches(PEER_ROWS.value, PEER_ROWS.value)
  sizes = [config.vocab_size, config.d_model, config.d_ff, config.num_layers, config.num_heads, config.num_kv_heads]
  command = [PEER_PYTHON.value, str(pathlib.Path(__file__).with_name('depth_peer.py')), str(PEER_ROWS.value),
             str(SEQ_LEN.value), *map(str, sizes)]
  result = subprocess.run(command, capture_output=True, text=True, check=False)
  if result.returncode:
    raise UserError(f'{command[0]} could not run the peer: {result.stderr.strip().splitlines()[-1]}')
  theirs = json.loads(result.stdout.splitlines()[-1])
  ours = {}
  for name, work in ways(config, params, rows).items():
    work()
    ours[name] = timed(work)
  return {f'paper_{name}_over_ours': theirs[name] / ours[name] for name in ('angular', 'removal')} | {
      f'paper_{name}_seconds': theirs[name] for name in ('plain', 'angular', 'removal')}


def main():
  import jax

  from lns_jax.models import transformer
  config, size = model(), min(BATCH.value, ROWS.value)
  params = jax.jit(lambda rng: transformer.init(config, rng))(jax.random.key(0))
  for compiling in ways(config, params, batches(size, size)).values():
    compiling()
  work, seconds = ways(config, params, batches(ROWS.value, size)), {}
  for number in range(ROUNDS.value):
    for name in list(work) if number % 2 == 0 else reversed(list(work)):
      seconds.setdefault(name, []).append(timed(work[name]))
    print(f'round {number + 1}: ' + ', '.join(f'{name} {s[-1]:.2f} s' for name, s in seconds.items()), flush=True)
  ratios = {name: [a / b for a, b in zip(seconds[name], seconds['plain'])] for name in ('angular', 'removal')}
  median = {name: statistics.median(r) for name, r in ratios.items()}
  flops = removal_passes(config)
  found = {'plain_seconds': statistics.median(seconds['plain']), 'angular_over_plain': median['angular'],
           'removal_over_plain': median['removal'], 'ratios': ratios, 'removal_flops_over_plain': flops,
           'removal_time_over_flops': median['removal'] / flops}
  return found | (peer(config, params) if PEER_PYTHON.value else {})


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
