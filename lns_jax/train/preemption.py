"""SIGTERM asks a run to save and stop: one process alone, or all at the same step."""

import ctypes
import itertools
import os
import signal
import sys

import jax
from jax.experimental import multihost_utils

from lns_jax import distributed, signals

_counts = itertools.count(1)  # JAX takes rising numbers for as long as the program runs


class Signals:
  """What SIGTERM does to a run. A context manager.

  Before `begin` nothing is there to be saved, and this process ends at once, and the others with it. From then on the
  first SIGTERM makes `stop` answer yes; a second one ends this process at once. Of several processes any may get the
  signal, which JAX's preemption service tells the others.
  """

  def __init__(self):
    self._begun = self._asked = False
    self._heard = signals.heard(self._act)

  def __enter__(self):
    before = self._heard.__enter__()
    self._notify = (distributed.notice() or before) if jax.process_count() > 1 else None
    return self

  def __exit__(self, *error):
    return self._heard.__exit__(*error)

  def _act(self):
    if not self._begun:
      distributed.end_preempted()
    if self._asked:
      print('preempted: a second SIGTERM ends this process at once; the same command goes on from what is saved.',
            file=sys.stderr, flush=True)
      os._exit(distributed.PREEMPTED)
    self._asked = True
    if self._notify is not None:
      ctypes.CFUNCTYPE(None, ctypes.c_int)(self._notify)(signal.SIGTERM)

  def begin(self):
    """From now on there is something to save."""
    self._begun = True

  def stop(self) -> bool:
    """Whether to save and stop here. All processes must ask at the same places, and get the same answer."""
    if jax.process_count() == 1:
      return self._asked
    return multihost_utils.reached_preemption_sync_point(next(_counts))
