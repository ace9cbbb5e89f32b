"""SIGTERM asks a run to save and stop: one process alone, or all at the same step."""

import contextlib
import ctypes
import itertools
import signal

import jax
from jax.experimental import multihost_utils

_counts = itertools.count(1)  # JAX takes rising numbers for as long as the program runs


class Signals:
  """From the first SIGTERM on `stop` answers yes; a second one ends this process at once.

  Of several processes any may get the signal, which JAX's preemption service tells the others.
  """

  def __enter__(self):
    self._asked = False
    self._notify = _notice_of_jax() if jax.process_count() > 1 else None
    def handler(number, frame):
      self._asked = True
      signal.signal(signal.SIGTERM, signal.SIG_DFL)
      if self._notify is not None:
        ctypes.CFUNCTYPE(None, ctypes.c_int)(self._notify)(number)
    try:
      self._old = signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not in the main thread: a notebook's
      self._old = None
    return self

  def __exit__(self, *_):
    if self._old is not None:
      signal.signal(signal.SIGTERM, self._old)
    if self._notify is not None:
      _c_signal()(signal.SIGTERM, self._notify)

  def stop(self) -> bool:
    """Whether to save and stop here. All processes must ask at the same places, and get the same answer."""
    if jax.process_count() == 1:
      return self._asked
    return multihost_utils.reached_preemption_sync_point(next(_counts))


def _notice_of_jax() -> int | None:
  """The address of JAX's own handler of SIGTERM, which Python's would replace; None if there is none."""
  with contextlib.suppress(OSError, AttributeError):
    return _c_signal()(signal.SIGTERM, None)


def _c_signal():
  """The signal function of C, which tells the handler that it replaces."""
  function = ctypes.CDLL(None).signal
  function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
  return function
