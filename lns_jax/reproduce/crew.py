"""Work in processes of their own, a few at a time, each on its own processors, until none is left or a signal comes."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from lns_jax.errors import Preempted, UserError

POLL_SECONDS, PATIENCE_SECONDS = 0.2, 60.0
PREEMPTED = 75


@dataclasses.dataclass(frozen=True)
class Job:
  """What `lns_jax.reproduce.job` is to do: a name, the folder of its log.txt and record, and its first line."""

  name: str
  folder: pathlib.Path
  line: dict = dataclasses.field(compare=False)


def processors(jobs: int) -> list[list[int]]:
  """The processors of each of `jobs` processes; empty lists where a single one has all."""
  if jobs == 1:
    return [[]]
  if not hasattr(os, 'sched_getaffinity'):
    raise UserError(f'--jobs={jobs} keeps each process on its own processors, which this system cannot; use --jobs=1.')
  usable = sorted(os.sched_getaffinity(0))
  if jobs > len(usable):
    raise UserError(f'--jobs={jobs} is more than the {len(usable)} processors.')
  each = len(usable) // jobs
  return [usable[i * each:(i + 1) * each] for i in range(jobs)]


def size(place: list[int]) -> int:
  """How many processors a place of `processors` has."""
  return len(place) or (len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())


class Signals:
  """The first SIGTERM or Ctrl-C asks all running jobs to save and stop; a second one ends this process at once."""

  def __init__(self, running: dict):
    self.asked, self._running, self._old = False, running, {}

  def __enter__(self):
    for number in (signal.SIGTERM, signal.SIGINT):
      with contextlib.suppress(ValueError):  # not in the main thread: a notebook's
        self._old[number] = signal.signal(number, self._stop)
    return self

  def _stop(self, number, frame):
    self.asked = True
    signal.signal(number, signal.SIG_DFL)
    for process in self._running.values():
      process.send_signal(signal.SIGTERM)

  def __exit__(self, *_):
    for number, handler in self._old.items():
      signal.signal(number, handler)


def work(todo: Callable[[], list[Job]], done: Callable[[Job], None], places: list[list[int]], *,
         cache: pathlib.Path, tick: Callable[[list[str]], None] = lambda names: None):
  """Runs jobs until `todo` names none.

  Args:
    todo: what is left in the order of doing it; asked again whenever a place is free; running ones may be in it.
    done: told of every job that ended well; what it did must not be in `todo` again.
    places: from `processors`. cache: folder of compiled programs. tick: told the names of running jobs.

  Raises:
    Preempted: after SIGTERM or Ctrl-C, once the running jobs have saved.
    UserError: a job failed; the others are asked to save and stop.
  """
  running, at = {}, {}
  with Signals(running) as signals:
    try:
      while True:
        if not signals.asked and len(running) < len(places):
          for job in [j for j in todo() if j not in running][:len(places) - len(running)]:
            at[job] = next(i for i in range(len(places)) if i not in at.values())
            running[job] = _start(job, places[at[job]], cache)
        if not running:
          break
        tick([j.name for j in running])
        time.sleep(POLL_SECONDS)
        for job in [j for j, p in running.items() if p.poll() is not None]:
          process = running.pop(job)
          del at[job]
          if process.returncode == 0:
            done(job)
          elif not signals.asked:
            raise _failure(job, process.returncode)
    finally:
      _end(running)
  if signals.asked:
    raise Preempted('finished runs are recorded and the running ones saved; the same command goes on from there.')


def _start(job: Job, cores: list[int], cache: pathlib.Path) -> subprocess.Popen:
  job.folder.mkdir(parents=True, exist_ok=True)
  env = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  with open(job.folder / 'log.txt', 'w') as log:
    # A session of its own: Ctrl-C is for this process, which then asks its jobs to save.
    process = subprocess.Popen([sys.executable, '-m', 'lns_jax.reproduce.job'], stdin=subprocess.PIPE, stdout=log,
                               stderr=subprocess.STDOUT, env=env, start_new_session=True)
  with contextlib.suppress(BrokenPipeError):  # it failed already: its code and log say why
    process.stdin.write(json.dumps(job.line | {'cores': cores}).encode() + b'\n')
    process.stdin.flush()
  return process


def _failure(job: Job, code: int) -> UserError:
  log = job.folder / 'log.txt'
  if code < 0:
    why = f'was ended by signal {-code}' + (', perhaps for lack of memory' if code == -signal.SIGKILL else '')
  elif code == PREEMPTED:
    why = 'was preempted'
  else:
    last = log.read_text(errors='replace').strip().splitlines()[-1:]
    why = f'ended with code {code}: {last[0].removeprefix("error: ").rstrip(".") if last else "no output"}'
  return UserError(f'{job.name} {why}; its log is {log}, and the same command goes on with what is not done.')


def _end(running: dict):
  """Asks what still runs to save, and waits; what does not end is killed."""
  for process in running.values():
    process.terminate()
  deadline = time.monotonic() + PATIENCE_SECONDS
  for process in running.values():
    try:
      process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
