"""What JAX leaves open about joining processes: who they are, who is missing, and an end that it makes by abort.

All that is not public in JAX is here; tried with 0.10.2 and 0.12.
"""

import contextlib
import ctypes
import functools
import os
import pathlib
import socket
import sys
import threading
from collections.abc import Callable

from lns_jax.errors import UserError

EVERY = 60  # seconds between two lines on who is missing
CAUSES = ('usual causes: the command runs on one host alone (--worker=all starts it on all), a firewall blocks the '
          'port, other hosts are still installing, --coordinator is not the address of process 0')
_kept = []  # C++ calls it as long as the program runs


def of_environment(any_cluster: bool, timeout: int) -> tuple[str, int, int] | None:
  """(HOST:PORT, processes, process) that JAX detects: of a TPU slice, or `any_cluster`. None for one process alone.

  Raises UserError when a cluster is asked for, and there is none.
  """
  if not any_cluster and 'tpu' not in (os.environ.get('JAX_PLATFORMS') or 'tpu'):  # '' is JAX's own choice
    return None
  try:
    from jax._src.clusters import ClusterEnv  # asks without joining: one host alone needs no coordinator
    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    kinds = [kind for kind in kinds if any_cluster or 'tpu' in kind.name]
    found = next((kind for kind in kinds if kind.is_env_present()), None)
    if found is None and any_cluster:
      raise UserError('--distributed=on, but JAX knows no cluster that this host is part of; give '
                      '--coordinator=HOST:PORT --processes=N --process=I.')
    if found is None or (count := found.get_process_count()) == 1:
      return None
    port = os.environ.get('JAX_COORDINATOR_PORT')
    address = found.get_coordinator_address(timeout_secs=timeout, override_coordinator_port=port)
    return address, count, found.get_process_id()
  except (ImportError, AttributeError, RuntimeError, OSError) as e:
    raise UserError(f'the hosts of this run were not found ({e}); give --coordinator=HOST:PORT --processes=N '
                    '--process=I, or --distributed=off for this host alone.') from None


def watch(coordinator: str, count: int, index: int, timeout: int, there: threading.Event,
          end: Callable[[int, str], None]):
  """Says every minute what is missing, until `there` is set; `end`s the program with code 1 after `timeout` seconds."""
  def run():
    waited = 0
    while not there.wait(min(EVERY, timeout - waited)):
      waited = min(waited + EVERY, timeout)
      words = f'{missing(coordinator, count, index)} after {waited} s; {CAUSES}.'
      if waited == timeout:
        return end(1, f'error: {words}')
      print(f'process {index} of {count} is waiting: {words}', file=sys.stderr, flush=True)
  threading.Thread(target=run, daemon=True).start()


def missing(coordinator: str, count: int, index: int) -> str:
  """What this process knows of those that have not come."""
  host, port = coordinator.rsplit(':', 1)
  if index == 0:
    here = connected(int(port))
    return 'not all processes have come' if here is None else f'{max(here, 1)} of {count} processes have come'
  try:
    socket.create_connection((host.strip('[]'), int(port)), timeout=5).close()
  except OSError as e:
    return f'process 0 of {count} does not answer at {coordinator} ({e.strerror or e})'
  return f'process 0 answers at {coordinator}, but not all {count} processes have come'


def connected(port: int) -> int | None:
  """How many processes, with the one that listens, are connected to a port here; None if the system does not say."""
  found = set()
  for table in ('tcp', 'tcp6'):
    with contextlib.suppress(OSError):
      for line in pathlib.Path('/proc/net', table).read_text().splitlines()[1:]:
        _, local, remote, state = line.split()[:4]
        if local.endswith(f':{port:04X}') and state == '01':
          found.add(remote)
  return len(found) or None


def keep(name: str):
  """Leaves 'stdout' or 'stderr' to Python alone: gloo prints on the first, threads of JAX on the second."""
  stream, number = getattr(sys, name), {'stdout': 1, 'stderr': 2}[name]
  stream.flush()
  ours = os.dup(number)
  os.dup2(os.open(os.devnull, os.O_WRONLY), number)
  setattr(sys, name, os.fdopen(ours, 'w', buffering=1))


@contextlib.contextmanager
def on_broken(act: Callable[[], None]):
  """A client of JAX's that is made in here calls `act` where it would abort: when another process is silent.

  jaxlib takes a Python function for that, but cannot convert the status that it would hand over. The error leaves a
  thread of C++, which ends in C++'s own handler of such: that is where `act` is called, with any jaxlib of today. Where
  there is no such function or handler, JAX aborts with code 134.
  """
  try:
    from jax._src.lib import _jax
    make, cxx = _jax.get_distributed_runtime_client, ctypes.CDLL('libstdc++.so.6')
    set_handler, current_error = cxx._ZSt13set_terminatePFvvE, cxx.__cxa_current_exception_type
  except (ImportError, AttributeError, OSError):
    make = None
  if 'missed_heartbeat_callback' not in (getattr(make, '__doc__', '') or ''):
    yield
    return
  handler = ctypes.CFUNCTYPE(None)
  set_handler.restype = current_error.restype = ctypes.c_void_p
  def ended():
    error = current_error()  # a std::type_info: a table of functions, then its name
    if error and ctypes.c_char_p.from_address(error + ctypes.sizeof(ctypes.c_void_p)).value == b'St8bad_cast':
      act()
    handler(before)()
  _kept.append(handler(ended))
  before = set_handler(_kept[-1])
  _jax.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: act())
  try:
    yield
  finally:
    _jax.get_distributed_runtime_client = make


def client():
  """JAX's client of the service that process 0 carries; None where JAX has none at this place."""
  try:
    from jax._src.distributed import global_state
    return global_state.client
  except (ImportError, AttributeError):
    return None
