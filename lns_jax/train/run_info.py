"""What a run folder says of itself: command, commit, versions, hardware, resolved config, corpus."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

from lns_jax import files
from lns_jax.errors import UserError

PACKAGES = ('lns_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'tensorflow-datasets', 'numpy')


def _commit() -> str | None:
  """Commit of the source tree, with '-dirty' when it was changed; None outside a git checkout."""
  here = pathlib.Path(__file__).parent
  try:
    run = subprocess.run(['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*'], cwd=here,
                         capture_output=True, text=True, timeout=10)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return run.stdout.strip() or None


def version(package: str) -> str | None:
  """Of an installed package; None where it is not."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def hardware() -> dict[str, Any]:
  """Devices and host, in words and numbers."""
  devices = jax.devices()
  return {'backend': jax.default_backend(), 'device': devices[0].device_kind, 'devices': len(devices),
          'processes': jax.process_count(), 'cpu_cores': os.cpu_count(), 'machine': platform.machine(),
          'cpu': cpu_name(), 'python': platform.python_version()}


def cpu_name() -> str:
  """The processor's own name where the system tells it."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    return next(line.split(':', 1)[1].strip() for line in lines if line.startswith('model name'))
  except (OSError, StopIteration):
    return platform.processor()


def collect(config: dict[str, Any], corpus_hash: str | None) -> dict[str, Any]:
  """The content of run_info.json."""
  return {'command': sys.orig_argv, 'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
          'commit': _commit(), 'versions': {p: version(p) for p in PACKAGES}, 'hardware': hardware(),
          'corpus_hash': corpus_hash, 'config': config}


def read(workdir) -> dict[str, Any]:
  """The run_info.json of a run folder. Raises UserError when there is none or it is damaged."""
  path = pathlib.Path(workdir).expanduser() / 'run_info.json'
  if not path.is_file():
    raise UserError(f'{workdir} is not a run folder: it has no run_info.json.')
  return files.read_json(path, f'run the training command of {workdir} again')
