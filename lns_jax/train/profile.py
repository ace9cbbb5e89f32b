"""A trace of some steps of a run: what host and devices did, and when (`profile.steps`)."""

import contextlib
import pathlib

import jax

from lns_jax.distributed import say

FOLDER = 'profile'  # in the run folder


class Trace:
  """Traces the steps of a range into WORKDIR/profile, on process 0: every process runs the same program.

  Use it as a context, so that the trace is written also when the run is stopped or fails, and each step as
  `with trace.step(step, state)`. A run that goes on from a step behind the range traces nothing.
  """

  def __init__(self, steps: range, workdir: pathlib.Path):
    self.steps, self.folder, self.running = steps, pathlib.Path(workdir) / FOLDER, False

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._stop()

  def step(self, step: int, state):
    """A context for fetching a batch and starting a step. Before the first and behind the last it waits for `state`."""
    if self.running and step not in self.steps:
      jax.block_until_ready(state)
      self._stop()
    if step not in self.steps or jax.process_index():
      return contextlib.nullcontext()
    if not self.running:
      jax.block_until_ready(state)
      jax.profiler.start_trace(self.folder)
      self.running = True
    return jax.profiler.StepTraceAnnotation('train', step_num=step)

  def _stop(self):
    if not self.running:
      return
    self.running = False
    jax.profiler.stop_trace()
    say(f'the trace of steps {self.steps.start} to {self.steps.stop - 1} lies in {self.folder}; to look at it: '
        f'pip install xprof && xprof --port 8791 {self.folder}')
