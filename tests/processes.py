"""Several real processes of one training run on this machine."""

import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
FLAGS = '--xla_backend_optimization_level=0'  # quick compiles, as of the tests themselves


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('localhost', 0))
    return s.getsockname()[1]


def start(command: str, arguments, cache, *, processes: int = 1, devices: int = 1, only=None) -> list[subprocess.Popen]:
  """An experiment on `processes` processes with `devices` each; of them only those in `only`, when given."""
  env = os.environ | {
      'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': f'{FLAGS} --xla_force_host_platform_device_count={devices}',
      'LNS_JAX_CACHE': str(cache), 'JAX_COMPILATION_CACHE_DIR': str(cache / 'jax'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  program, port = [sys.executable, str(ROOT / f'experiments/{command}.py'), *arguments], free_port()
  together = lambda i: [f'--coordinator=localhost:{port}', f'--processes={processes}', f'--process={i}']
  return [subprocess.Popen(program + (together(i) if processes > 1 else []), env=env, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
          for i in (range(processes) if only is None else only)]


def ends(children, timeout: float = 400) -> list[tuple[int, str, str]]:
  """(exit code, stdout, last line of stderr) of each."""
  try:
    found = [child.communicate(timeout=timeout) for child in children]
  finally:
    for child in children:
      child.kill()
  return [(child.returncode, out, (err.strip().splitlines() or [''])[-1]) for child, (out, err) in zip(children, found)]


def wait(children, condition, timeout: float = 400):
  """Returns when the condition is true; fails when a process ends before."""
  deadline = time.monotonic() + timeout
  while not condition():
    gone = [child for child in children if child.poll() is not None]
    assert not gone, gone[0].communicate()[1][-2000:]
    assert time.monotonic() < deadline, 'the run did not get there'
    time.sleep(0.01)
