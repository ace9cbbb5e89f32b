"""Train steps of two runs timed in turn in one process, so that what else the machine does hits both."""

import pathlib
import statistics
import time

import jax

from lns_jax.config import RunConfig
from lns_jax.train import evaluate, loop

ROUNDS, STEPS = 9, 3


def measure(configs: list[RunConfig], folder: pathlib.Path) -> dict:
  """Speed of the second config's compiled train step against the first's.

  Returns {'ratio' (seconds of the first over seconds of the second: above 1 the second is faster; median over
  rounds), 'low', 'high' (of all rounds), 'tokens_per_second' [2] (medians), 'steps' (timed of each), 'corpus_hash'}.
  Layer statistics are part of the step where the config has them.
  """
  sides, tokens = [], configs[0].train.batch_size * configs[0].data.seq_len
  for i, config in enumerate(configs):
    run = loop.set_up(loop.resolved(config), folder / str(i))
    batch = evaluate.place(run.mesh, next(iter(run.dataset.train_batches(0, config.train.batch_size, num_steps=1))))
    sides.append([run.compile_train_step(), run.fresh_state(), batch])
  times = [[], []]
  for number in range(ROUNDS + 1):
    for i in (0, 1) if number % 2 else (1, 0):
      times[i].append(_seconds(sides[i]))
  first, second = (t[1:] for t in times)  # the first round warms up
  ratios = [a / b for a, b in zip(first, second)]
  return {'ratio': statistics.median(ratios), 'low': min(ratios), 'high': max(ratios), 'steps': ROUNDS * STEPS,
          'tokens_per_second': [STEPS * tokens / statistics.median(t) for t in (first, second)],
          'corpus_hash': run.dataset.hash}


def _seconds(side: list) -> float:
  """Of STEPS steps; the state goes on."""
  step, state, batch = side
  start = time.perf_counter()
  for _ in range(STEPS):
    state, metrics = step(state, batch)
  jax.block_until_ready(metrics)
  side[1] = state
  return time.perf_counter() - start
