"""SIGTERM is heard whatever the main thread does, and only in there."""

import os
import signal
import subprocess
import sys
import threading

from lns_jax import signals

# SIGTERM of a thread, while the main thread is in a function of C, as in a compiler or a collective.
DEAF = """
import ctypes, os, signal, threading, time
from lns_jax import signals
began = time.monotonic()
def act():
  print(time.monotonic() - began < 10, flush=True)
  os._exit(75)
with signals.heard(act):
  threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
  ctypes.CDLL(None).sleep(30)
"""


def test_sigterm_is_heard_in_a_function_of_c():
  done = subprocess.run([sys.executable, '-c', DEAF], capture_output=True, text=True, timeout=120)
  assert (done.returncode, done.stdout) == (75, 'True\n'), done.stderr


def test_a_command_of_many_hosts_hears_it_from_its_start():
  deaf = """
import ctypes, os, signal, threading
from lns_jax import distributed
distributed.expect_sigterm()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
ctypes.CDLL(None).sleep(30)
"""
  done = subprocess.run([sys.executable, '-c', deaf], capture_output=True, text=True, timeout=20)
  assert done.returncode == 75 and done.stderr.strip().startswith('preempted: SIGTERM came before')


def test_each_sigterm_is_heard_by_the_innermost_and_what_was_before_comes_back():
  outer, inner, own = [], [], []
  before = signal.signal(signal.SIGTERM, lambda *_: own.append(1))
  try:
    with signals.heard(lambda: outer.append(1)):
      with signals.heard(lambda: inner.append(1)) as address:
        assert address is None  # Python's own handler of handlers is nobody to be told
        for _ in range(2):
          os.kill(os.getpid(), signal.SIGTERM)
        assert (outer, inner) == ([], [1, 1])  # at once: what follows sees it
      os.kill(os.getpid(), signal.SIGTERM)
      assert (outer, inner, own) == ([1], [1, 1], [])
    os.kill(os.getpid(), signal.SIGTERM)
    assert (outer, inner, own) == ([1], [1, 1], [1])
  finally:
    signal.signal(signal.SIGTERM, before)


def test_in_another_thread_nothing_changes():
  before, found = signal.getsignal(signal.SIGTERM), []
  def enter():
    with signals.heard(lambda: None) as address:
      found.append((address, signal.getsignal(signal.SIGTERM)))
  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert found == [(None, before)]
