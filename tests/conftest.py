"""Eight forced host devices, quick compiles, and one cache of data and programs for the whole session."""

import os
import pathlib
import signal

os.environ['JAX_PLATFORMS'] = 'cpu'
FLAGS = '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
os.environ['XLA_FLAGS'] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

# Whoever starts the tests in the background has them ignore Ctrl-C, and the processes that they start, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(scope='session', autouse=True)
def cache(tmp_path_factory):
  """Prepared data and compiled programs are shared by all tests and all workers of one session."""
  base = tmp_path_factory.getbasetemp()
  root = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
  os.environ['LNS_JAX_CACHE'] = str(root / 'lns_jax_cache')
  jax.config.update('jax_compilation_cache_dir', str(root / 'jax_cache'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  return root / 'lns_jax_cache'


@pytest.fixture(autouse=True)
def programs():
  """Compiled programs go before a process has too many: each maps memory, of which Linux gives 65,530 pieces."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > 25_000:
    jax.clear_caches()
