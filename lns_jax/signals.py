"""SIGTERM, heard also while the main thread waits for a compiler, a device or another process, where Python is deaf."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def heard(act: Callable[[], None]) -> Iterator[int | None]:
  """In here every SIGTERM calls `act` in a thread of its own; what was done before on SIGTERM comes back at the end.

  Yields the address of the function of C that was called before, of which Python need not know; None for none, for
  Python's own, and outside of the main thread (a notebook's), where nothing changes.
  """
  if threading.current_thread() is not threading.main_thread():
    yield None
    return
  function = ctypes.CDLL(None).signal  # it tells what it replaces
  function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
  read, write = os.pipe()
  os.set_blocking(write, False)
  acted = threading.Event()
  def listen():
    while number := os.read(read, 1):
      if number[0] == signal.SIGTERM:
        act()
        acted.set()
      elif others >= 0:
        os.write(others, number)
    os.close(read)
  def handler(*_):  # what the main thread does next sees what `act` did
    acted.wait(1)
    acted.clear()
  others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
  before = function(signal.SIGTERM, None)
  known = signal.signal(signal.SIGTERM, handler)
  python = function(signal.SIGTERM, None)  # what calls handlers that are written in Python, also those of before
  function(signal.SIGTERM, python)
  threading.Thread(target=listen, daemon=True).start()
  try:
    yield before if before != python else None
  finally:
    signal.signal(signal.SIGTERM, known or signal.SIG_DFL)
    function(signal.SIGTERM, before)
    signal.set_wakeup_fd(others)
    os.close(write)
