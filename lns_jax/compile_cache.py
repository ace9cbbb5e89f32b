"""Compiled programs, kept between starts of the commands by jax's own persistent cache."""

import hashlib
import os
import pathlib
import platform
import time
import warnings

from lns_jax import files

VARIABLE = 'JAX_COMPILATION_CACHE_DIR'
DAYS = 30  # a program that was compiled longer ago is removed: jax's cache only grows


def use() -> None:
  """Has jax, which must not be imported yet, keep programs that took more than a second to compile.

  They lie below $LNS_JAX_CACHE or the user's cache folder. A user's own JAX_COMPILATION_CACHE_DIR wins, also one on
  gs://; JAX_ENABLE_COMPILATION_CACHE=false turns it off. Where the folder cannot be written there is no cache.
  """
  # A damaged entry, or a full disk, costs the time of compiling and no more.
  warnings.filterwarnings('ignore', 'Error (reading|writing) persistent compilation cache')
  if VARIABLE in os.environ:
    return
  folder = files.cache_folder() / f'programs-{_machine()}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    _remove_old(folder)
  except OSError:
    return
  if os.access(folder, os.W_OK):
    os.environ[VARIABLE] = str(folder)


def _machine() -> str:
  """Eight digits for the processor: jax's keys do not hold it, but a program for a CPU is compiled for its features."""
  info = pathlib.Path('/proc/cpuinfo')
  lines = info.read_text().splitlines() if info.exists() else []
  features = next((line for line in lines if line.startswith(('flags', 'Features'))), '')
  return hashlib.sha256(f'{platform.machine()} {platform.processor()} {features}'.encode()).hexdigest()[:8]


def _remove_old(folder: pathlib.Path) -> None:
  for entry in folder.glob('*-cache'):
    if time.time() - entry.stat().st_mtime > DAYS * 86_400:
      entry.unlink(missing_ok=True)
