"""Machines that have libtpu and no TPU: what must stand in the environment before jax is imported, and quiet."""

import contextlib
import glob
import importlib.util
import os
import sys
import tempfile

from lns_jax.errors import UserError

DEVICES = ('/dev/accel*', '/dev/vfio/[0-9]*')  # where a TPU VM, or a container on one, has its chips
GPU_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm60_plugin', 'jax_rocm7_plugin')


def leave_out_tpu():
  """Where libtpu is installed, no TPU is there and nothing says what to use: the CPU.

  JAX would try libtpu first, which prints errors before it fails. With a GPU's plugin the choice stays JAX's.
  """
  if 'JAX_PLATFORMS' in os.environ or any(map(glob.glob, DEVICES)) or not _installed('libtpu'):
    return
  if not any(map(_installed, GPU_PLUGINS)):
    os.environ['JAX_PLATFORMS'] = 'cpu'


def compile_for_tpu():
  """Lets this process load libtpu as a compiler alone, whatever another process, alive or dead, does with it.

  Raises UserError when libtpu is not installed.
  """
  if not _installed('libtpu'):
    raise UserError("compiling for a TPU needs its compiler, libtpu, which is not installed here: pip install "
                    "'lns_jax[tpu]' (no TPU is needed).")
  os.environ |= {
      'JAX_PLATFORMS': 'cpu',
      'TPU_SKIP_MDS_QUERY': '1',  # no question to the metadata server of a cloud
      'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # a lock file that was left behind is no matter
      'JAX_ENABLE_COMPILATION_CACHE': 'false'}  # its seconds are a result


def _installed(module: str) -> bool:
  return importlib.util.find_spec(module) is not None


@contextlib.contextmanager
def without_stderr():
  """Keeps what native code writes to stderr away from the user; shown after all when the body fails."""
  sys.stderr.flush()
  kept = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield
    except BaseException:
      file.seek(0)
      os.write(kept, file.read())
      raise
    finally:
      os.dup2(kept, 2)
      os.close(kept)
