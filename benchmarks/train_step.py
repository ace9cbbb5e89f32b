"""One train step against transformers with torch, side by side: each in its own process, in turn, in pairs.

  python benchmarks/train_step.py [--rounds=5] [--layer_stats] [--peer_python=DIR/bin/python]

22.7M parameters by default: vocabulary 32000, D 256, L 8, 4 heads, F 688, B 8, T 256, float32, Adam. Both sides get
the same processors, number of threads and environment. Ends with one JSON line; a ratio above 1 means that we are
faster, and `ratio_median` is the median over the pairs.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from lns_jax import cli
from lns_jax.errors import UserError

PEER = pathlib.Path('shared/bench/peer_train.py')  # beside the repository, not in it

ROUNDS = flags.DEFINE_integer('rounds', 5, 'Pairs of measurements.', lower_bound=1)
STEPS = flags.DEFINE_integer('steps', 5, 'Timed steps of each measurement, after two that are not.', lower_bound=1)
PEER_PYTHON = flags.DEFINE_string('peer_python', sys.executable, 'A Python that has torch and transformers.')
PEER_SCRIPT = flags.DEFINE_string('peer_script', str(pathlib.Path(__file__).resolve().parents[2] / PEER),
                                  'The peer: a program that prints JSON with step_s.')
PEER_KIND = flags.DEFINE_string('peer_kind', 'hf-eager', 'First argument of the peer.')
THREADS = flags.DEFINE_integer('threads', 0, 'Threads of both sides; 0: as many as processors.', lower_bound=0)
D_MODEL = flags.DEFINE_integer('d_model', 256, 'D.', lower_bound=1)
D_FF = flags.DEFINE_integer('d_ff', 688, 'F.', lower_bound=1)
LAYERS = flags.DEFINE_integer('layers', 8, 'L.', lower_bound=1)
HEADS = flags.DEFINE_integer('heads', 4, 'H.', lower_bound=1)
BATCH = flags.DEFINE_integer('batch', 8, 'B: rows.', lower_bound=1)
SEQ_LEN = flags.DEFINE_integer('seq_len', 256, 'T: positions of a row.', lower_bound=2)
SCHEME = flags.DEFINE_string('scheme', 'lns', 'Norm placement of our model.')
LOOP = flags.DEFINE_string('loop', 'unrolled', 'Loop over layers of our model: unrolled or scan.')
LAYER_STATS = flags.DEFINE_boolean('layer_stats', False, 'Whether our step computes per-layer statistics too.')
ONLY_OURS = flags.DEFINE_boolean('only_ours', False, 'Measures our step once, in this process, and nothing else.')


def measure_ours() -> dict:
  """Median seconds of our step, its loss fetched each time, after two steps that are not timed."""
  import numpy as np

  from lns_jax import sharding
  from lns_jax.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
  from lns_jax.train import step as step_lib
  from lns_jax.train.run import Run

  config = RunConfig(
      model=ModelConfig(vocab_size=32000, d_model=D_MODEL.value, d_ff=D_FF.value, num_layers=LAYERS.value,
                        num_heads=HEADS.value, scheme=SCHEME.value, loop=LOOP.value, precision='float32'),
      data=DataConfig(seq_len=SEQ_LEN.value), optimizer=OptimizerConfig(name='adam', lr=1e-3, schedule='constant'),
      train=TrainConfig(steps=1000, batch_size=BATCH.value, layer_stats_every=int(LAYER_STATS.value)))
  mesh = sharding.make_mesh(config.mesh)
  run = Run(config, mesh, 1000, step_lib.state_shardings(mesh, config, 1000), pathlib.Path(), None)
  ids = np.random.default_rng(0).integers(0, 32000, (BATCH.value, SEQ_LEN.value + 1), np.int32)
  batch = {'tokens': ids[:, :-1], 'targets': ids[:, 1:], 'segment_ids': np.ones_like(ids[:, 1:])}
  start = time.perf_counter()
  step, state = run.compile_train_step(), run.fresh_state()
  compiled, times = time.perf_counter() - start, []
  for _ in range(2 + STEPS.value):
    begin = time.perf_counter()
    state, metrics = step(state, batch)
    float(metrics['loss'])
    times.append(time.perf_counter() - begin)
  return {'step_s': statistics.median(times[2:]), 'compile_s': compiled}


def written(file) -> list[str]:
  """Lines of a file that are not blank."""
  file.seek(0)
  return [line for line in file if line.strip()]


def child(command: list[str], threads: int) -> dict:
  """Runs a program that prints JSON last; returns that with 'peak_gb', its peak resident memory in GB.

  Raises UserError with the end of its output when it fails.
  """
  env = {**os.environ, 'THREADS': str(threads), 'OMP_NUM_THREADS': str(threads), 'NPROC': str(threads)}
  with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
    process = subprocess.Popen(command, stdout=out, stderr=err, env=env)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    lines, errors = written(out), written(err)
  if process.returncode or not lines:
    raise UserError(f'{command[1]} under {command[0]} ended with code {process.returncode}: '
                    f'{errors[-1].strip() if errors else "no output"}')
  unit = 1 if sys.platform == 'darwin' else 1024
  return json.loads(lines[-1]) | {'peak_gb': usage.ru_maxrss * unit / 1e9}


def commands() -> dict[str, list[str]]:
  """The two programs of a pair, 'our' and 'peer'."""
  sizes = (D_MODEL, D_FF, LAYERS, HEADS, BATCH, SEQ_LEN, STEPS)
  peer = [PEER_PYTHON.value, PEER_SCRIPT.value, PEER_KIND.value, *(str(s.value) for s in sizes)]
  own = (*sizes, SCHEME, LOOP)
  ours = [sys.executable, __file__, '--only_ours', *(f'--{f.name}={f.value}' for f in own),
          *(['--layer_stats'] if LAYER_STATS.value else [])]
  return {'our': ours, 'peer': peer}


def main():
  if ONLY_OURS.value:
    return measure_ours()
  if not pathlib.Path(PEER_SCRIPT.value).is_file():
    raise UserError(f'the peer {PEER_SCRIPT.value} does not exist; give its place with --peer_script.')
  processors = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count())
  threads = THREADS.value or len(processors)
  if threads > len(processors):
    raise UserError(f'--threads={threads} is more than the {len(processors)} processors.')
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, processors[:threads])  # inherited: XLA takes a thread for each processor it may use
  programs, found = commands(), {'our': [], 'peer': []}
  for number in range(ROUNDS.value):
    for side in ('our', 'peer') if number % 2 == 0 else ('peer', 'our'):
      found[side].append(child(programs[side], threads))
    report(number, *(found[side][-1] for side in found))
  return summary(found, threads)


def tokens_per_second(result: dict) -> float:
  return BATCH.value * SEQ_LEN.value / result['step_s']


def report(number: int, ours: dict, peer: dict):
  """One line on a pair."""
  side = lambda r: f"{r['step_s']:.3f} s a step, {tokens_per_second(r):,.0f} tokens/s, {r['peak_gb']:.2f} GB"
  print(f'pair {number + 1}: ours {side(ours)}; peer {side(peer)}; ratio {peer["step_s"] / ours["step_s"]:.3f}',
        flush=True)


def summary(found: dict[str, list[dict]], threads: int) -> dict:
  """The JSON line: medians over the pairs."""
  ratios = [peer['step_s'] / ours['step_s'] for ours, peer in zip(found['our'], found['peer'], strict=True)]
  values = {'ratio_median': statistics.median(ratios), 'ratios': ratios}
  for side, results in found.items():
    values |= {f'{side}_step_seconds': statistics.median(r['step_s'] for r in results),
               f'{side}_tokens_per_second': statistics.median(map(tokens_per_second, results)),
               f'{side}_peak_gb': max(r['peak_gb'] for r in results)}
  return values | {'our_compile_seconds': statistics.median(r['compile_s'] for r in found['our']),
                   'threads': threads, 'layer_stats': LAYER_STATS.value, 'scheme': SCHEME.value, 'loop': LOOP.value}


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
