"""Several processes as one run: how they join, what one tells the others, and how all end when one does.

A command that may be started on many hosts defines the flags and calls `join` before anything of JAX is used. From
then on `leave` ends this process and the others with it, and a process that is lost ends the rest with code 75.
"""

import atexit
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable

import tqdm
from absl import flags

from lns_jax import joining, signals
from lns_jax.errors import UserError

flags.disclaim_key_flags()  # they belong to the command that defines them

HEARTBEAT = 30  # seconds after which a silent process counts as lost
HEARD = 2.0  # seconds in which the others hear what one has said
_HOUR = 3_600_000  # milliseconds
COUNT = 'lns_jax/processes'  # key of how many process 0 was told that they are
LAST_WORDS = 'lns_jax/last_words'  # key of what the first process to end has said, {'code', 'sentence'}
END = 'lns_jax/end'  # where all wait for each other when they are done
PREEMPTED = LOST = 75
FAILED = 1
# What JAX, XLA and gloo say when another process does not answer; and what holds such words, but is this one's own: a
# program with a barrier of its optimizer that takes too much memory, a TPU that another program has.
_LOSS = re.compile(r'gloo|connection (closed|reset|refused)|socket closed|heartbeat|coordination service|UNAVAILABLE|'
                   r'ABORTED|CANCELLED|DEADLINE_EXCEEDED|(?<![-_])barrier', re.IGNORECASE)
_OWN = re.compile(r'(RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED)\b|.*(already in use|TPU initialization failed)',
                  re.DOTALL)

_early = contextlib.ExitStack()  # open for the rest of the program
_joined = None  # the Process of this program, once it has joined


def define_flags():
  """Defines the flags that `join` reads."""
  flags.DEFINE_enum('distributed', 'auto', ['auto', 'on', 'off'],
                    'Whether this is one of several processes: auto joins the hosts of a TPU slice, on those of any '
                    'cluster that JAX knows.')
  flags.DEFINE_string('coordinator', None, 'HOST:PORT of process 0, which the others can reach.')
  flags.DEFINE_integer('processes', None, 'Number of processes.', lower_bound=1)
  flags.DEFINE_integer('process', None, 'Number of this process, from 0.', lower_bound=0)
  flags.DEFINE_integer('join_timeout', 300, 'Seconds in which all processes must have started.', lower_bound=1)


class Process:
  """This process among the others; ends the program when it must."""

  def __init__(self, count: int, index: int):
    self.count, self.index, self.client = count, index, None
    self._heard, self._done = signals.heard(self._terminated), False
    self.notice = None  # the address of the handler of SIGTERM by which JAX's preemption service hears
    self._silent = threading.Event()  # nothing is listened to any more
    self._last = threading.Lock()

  def listen(self, client):
    """Starts to wait for what another process says when it ends."""
    self.notice = self._heard.__enter__()  # for the rest of the program
    if client is None:
      return
    self.client = client
    self._listener = threading.Thread(target=self._listen, daemon=True)
    self._listener.start()
    atexit.register(self._part)

  def _listen(self):
    while not self._silent.is_set():
      try:
        words = json.loads(self.client.blocking_key_value_get(LAST_WORDS, _HOUR))
      except Exception as e:  # an hour without a word; the end of this process; or that of process 0
        if not self._silent.is_set() and 'DEADLINE_EXCEEDED' not in str(e):
          self.end(LOST, lost(f'process 0 of {self.count} does not answer'))
      else:
        if not self._silent.is_set():
          self.end(words['code'], words['sentence'])

  def _terminated(self):
    """After SIGTERM: one that is done goes on waiting for the others, and ends with its own code."""
    if self._done:
      print('SIGTERM: this process is done and waits for the others.', file=sys.stderr, flush=True)
    else:
      end_preempted()

  def _part(self):
    """The orderly end: waits for the others, and for the listener, which must not outlive the interpreter."""
    import jax
    self._done = True
    try:  # not JAX's own, in which nothing may be listened to: one that still writes the result may fail
      self.client.wait_at_barrier(END, _HOUR)
    except Exception as e:
      time.sleep(HEARD)  # the listener knows more, if there is more to know
      self.end(LOST, lost(f'another of the {self.count} processes did not come to the end ({_gist(e)})'))
    self._silent.set()
    jax.distributed.shutdown()
    self._listener.join(10)

  def end(self, code: int, sentence: str, told: str = ''):
    """Ends this process at once with one sentence, the first that is asked for.

    told: what the others end with, unless another one has told them something already.
    """
    self._last.acquire()  # for good: the end of those who are told, which this one may see, is no sentence of its own
    try:
      self._silent.set()
      if told:
        teller = threading.Thread(target=self._tell, args=(code, told), daemon=True)
        teller.start()
        teller.join(HEARD)
        if self.index == 0:  # it carries the words of all
          time.sleep(HEARD)
    finally:  # after a second Ctrl-C, too: nobody else can end this process now
      _end(code, sentence)

  def _tell(self, code: int, sentence: str):
    with contextlib.suppress(Exception):  # process 0 is gone, or others spoke first
      self.client.key_value_set(LAST_WORDS, json.dumps({'code': code, 'sentence': sentence}))


def _end(code: int, sentence: str):
  try:
    with contextlib.suppress(OSError):
      joining.keep('stderr')  # the last word is ours
    print(f'\n{sentence}', file=sys.stderr, flush=True)  # a bar may stand in the line
    sys.stdout.flush()
    for child in multiprocessing.active_children():  # that prepare data
      child.kill()
  finally:
    os._exit(code)


def lost(how: str) -> str:
  """What is said when another process is gone."""
  return (f'lost: {how}, so that this process ends, too; what was saved is intact, and the same command on all hosts '
          'goes on from there.')


def _gist(error: Exception) -> str:
  return ' '.join(str(error).split())[:160]


def leave(code: int, sentence: str):
  """Ends this process with a sentence, and the others with its gist. Does nothing where one process is alone."""
  if _joined is not None:
    _joined.end(code, sentence, told=f'process {_joined.index} of {_joined.count} ended: {sentence}')


def end_preempted():
  """Ends this process at once after SIGTERM, when there is nothing to be saved; and the others."""
  sentence = 'preempted: SIGTERM came before there was anything to save; the same command goes on.'
  leave(PREEMPTED, sentence)
  _end(PREEMPTED, sentence)


def expect_sigterm():
  """SIGTERM ends this process with code 75 already while it imports, or waits for the others, as it does later."""
  _early.enter_context(signals.heard(end_preempted))


def notice() -> int | None:
  """The address of the function of C that tells JAX's preemption service of SIGTERM; None when `join` found none."""
  return None if _joined is None else _joined.notice


def leave_if_lost(error: BaseException | None):
  """Ends this process when the error comes from one that does not answer any more. Code 75, or what the other said."""
  loss = _loss(error) if _joined is not None else None
  if loss is None:
    return
  time.sleep(HEARD)  # the listener knows more, if there is more to know
  sentence = lost(f'another process was killed or cannot be reached (seen by process {_joined.index} of '
                  f'{_joined.count}: {_gist(loss)})')
  _joined.end(LOST, sentence, told=sentence)


def leave_crashed(error: Exception):
  """Ends this process after an error that nobody meant for a user, with its traceback; and the others."""
  leave_if_lost(error)
  if _joined is not None:
    traceback.print_exception(error)
    leave(FAILED, f'error: {type(error).__name__}: {error}')


def _loss(error):
  """The first error of a chain by which JAX reports another process's end; None when there is none."""
  from jax.errors import JaxRuntimeError
  while error is not None:
    text = str(error)
    jax_own = isinstance(error, JaxRuntimeError) or type(error) is ValueError and re.match('[A-Z_]+: Gloo', text)
    if jax_own and _LOSS.search(text) and not _OWN.match(text):
      return error
    error = error.__cause__ or error.__context__
  return None


@contextlib.contextmanager
def watched():
  """Where processes work together: one that is lost ends this one here, before anything else waits for it."""
  try:
    yield
  except Exception as e:
    leave_if_lost(e)
    raise


def primary() -> bool:
  """Whether this process speaks and writes for all."""
  return _joined is None or _joined.index == 0


def say(text: str):
  """A line for the user on stderr, from process 0."""
  if primary():
    tqdm.tqdm.write(text, file=sys.stderr)  # above a bar, not behind it


def from_first(find: Callable):
  """What process 0 finds, a JSON value, on all; they wait for it. Its UserError is raised by all."""
  import jax
  import numpy as np
  from jax.experimental import multihost_utils
  if jax.process_count() == 1:
    return find()
  text = b''
  if jax.process_index() == 0:
    try:
      text = json.dumps({'found': find()}).encode()
    except UserError as e:
      text = json.dumps({'error': str(e)}).encode()
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  text = np.frombuffer(text.ljust(size), np.uint8)
  told = json.loads(multihost_utils.broadcast_one_to_all(text).tobytes())
  if 'error' in told:
    raise UserError(told['error'])
  return told['found']


def join():
  """Joins the processes that the flags or the TPU environment name; returns at once where there is only this one.

  Raises:
    UserError: the flags contradict each other, or there are no such processes.
  """
  where = _asked(flags.FLAGS)
  if where is not None:
    _join(*where, flags.FLAGS.join_timeout)


def _asked(f) -> tuple[str, int, int] | None:
  """(HOST:PORT, processes, process), None for a process alone."""
  given = {name: f[name].value for name in ('coordinator', 'processes', 'process')}
  missing = [name for name, value in given.items() if value is None]
  if len(missing) == 3:
    return None if f.distributed == 'off' else joining.of_environment(f.distributed == 'on', f.join_timeout)
  if f.distributed == 'off':
    one = next(name for name in given if name not in missing)
    raise UserError(f'--distributed=off is one process alone, but --{one} is given.')
  if missing:
    raise UserError(f'--{missing[0]} must be given as well: --coordinator=HOST:PORT --processes=N --process=I, '
                    'I from 0 to N - 1.')
  coordinator, count, index = given.values()
  if index >= count:
    raise UserError(f'--process={index} is not one of --processes={count}, which are numbered from 0 to {count - 1}.')
  if not re.fullmatch(r'.+:[0-9]{1,5}', coordinator):
    raise UserError(f'--coordinator={coordinator} is not HOST:PORT, such as 10.0.0.2:8476.')
  return None if count == 1 else (coordinator, count, index)


def _join(coordinator: str, count: int, index: int, timeout: int):
  global _joined
  import jax
  joining.keep('stdout')
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  me, there = Process(count, index), threading.Event()
  joining.watch(coordinator, count, index, timeout, there, me.end)
  def broken():
    if there.is_set():
      me.end(LOST, lost(
          f'another of the {count} processes has been silent for {HEARTBEAT} seconds or was started a second time, or '
          'process 0 ended'))
    me.end(FAILED, f'error: process {index} could not join the others at {coordinator}: --processes differs, or two '
                   f'have --process={index}.')
  try:
    with joining.on_broken(broken):
      concurrent.futures.ThreadPoolExecutor(1).submit(  # in a thread, so that Ctrl-C is heard meanwhile
          jax.distributed.initialize, coordinator, count, index, cluster_detection_method='deactivate',
          heartbeat_timeout_seconds=HEARTBEAT, initialization_timeout=2 * timeout).result()  # the watchdog ends it
  except Exception as e:
    there.set()  # no orderly end from here on: JAX would try to part from the others
    me.end(FAILED, f'error: process {index} of {count} could not join the others at {coordinator}: '
                   f'{(str(e).splitlines() or [type(e).__name__])[0]}; is --processes the same for all?')
  there.set()
  _joined = me
  print(f'process {index} of {count} has joined' + ('' if index == 0 else '; process 0 tells of the run'),
        file=sys.stderr, flush=True)
  client = joining.client()
  me.listen(client)
  if client is not None:
    _check_count(client, count, index)


def _check_count(client, count: int, index: int):
  """JAX believes process 0, whatever the others were told."""
  if index == 0:
    client.key_value_set(COUNT, str(count))
  elif (first := client.blocking_key_value_get(COUNT, 60_000)) != str(count):
    raise UserError(f'process {index} was started with --processes={count} and process 0 with --processes={first}.')
