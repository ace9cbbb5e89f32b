"""Flags by chip, and programs that are kept: what stands in the environment before jax starts."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from lns_jax import compile_cache, xla_flags
from lns_jax.errors import UserError

WHOLE = '--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000'
ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
  for name in (xla_flags.VARIABLE, compile_cache.VARIABLE):
    monkeypatch.setenv(name, '')  # so that what a test sets is undone
    monkeypatch.delenv(name)
  monkeypatch.setenv('LNS_JAX_CACHE', str(tmp_path))


@pytest.mark.parametrize('choice, here, given, expected', [
    ('none', 'v6e', '--a=1', '--a=1'),
    ('untimed', '', '', ''),  # a CPU
    ('untimed', 'v4', '', ''),  # a chip of which nothing is tried
    ('untimed', 'v6e', '--a=1', f'--a=1 --xla_tpu_scoped_vmem_limit_kib=98304 {WHOLE}'),
    ('v5e', '', '', f'--xla_tpu_scoped_vmem_limit_kib=50000 {WHOLE}'),
    ('v5e', '', '--xla_tpu_scoped_vmem_limit_kib=5', f'--xla_tpu_scoped_vmem_limit_kib=5 {WHOLE}'),  # the user's own
])
def test_flags_of_the_chip_come_behind_those_of_the_user(choice, here, given, expected, monkeypatch):
  if given:
    monkeypatch.setenv(xla_flags.VARIABLE, given)
  added = xla_flags.use(choice, here)
  assert os.environ.get(xla_flags.VARIABLE, '') == expected
  assert ' '.join([*given.split(), *added]) == expected


def test_an_unknown_chip_is_refused():
  with pytest.raises(UserError, match='--xla_flags=v5 is not known. Did you mean .*none, untimed, v5e, v5p, v6e'):
    xla_flags.use('v5')


@pytest.mark.parametrize('vendor, device, name', [
    ('0x1ae0', '0x0063', 'v5e'), ('0x1ae0', '0x006f', 'v6e'), ('0x1ae0', '0x0042', ''), ('0x8086', '0x0063', '')])
def test_the_chip_is_read_from_the_bus(vendor, device, name, tmp_path):
  (tmp_path / '0000:00:05.0').mkdir()
  (tmp_path / '0000:00:05.0' / 'vendor').write_text(vendor + '\n')
  (tmp_path / '0000:00:05.0' / 'device').write_text(device + '\n')
  assert xla_flags.chip(tmp_path) == name


def test_old_programs_go_and_a_users_own_folder_is_left_alone(monkeypatch, tmp_path):
  compile_cache.use()
  folder = pathlib.Path(os.environ[compile_cache.VARIABLE])
  assert folder.parent == tmp_path
  for name, days in (('old-cache', 31), ('new-cache', 29)):
    (folder / name).touch()
    os.utime(folder / name, (time.time() - days * 86_400,) * 2)
  monkeypatch.delenv(compile_cache.VARIABLE)
  compile_cache.use()
  assert [f.name for f in folder.iterdir()] == ['new-cache']
  monkeypatch.setenv(compile_cache.VARIABLE, 'gs://mine')
  compile_cache.use()
  assert os.environ[compile_cache.VARIABLE] == 'gs://mine'


def test_where_the_folder_cannot_be_made_there_is_no_cache(monkeypatch, tmp_path):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('LNS_JAX_CACHE', str(tmp_path / 'file'))
  compile_cache.use()
  assert compile_cache.VARIABLE not in os.environ


PROGRAM = '''
import sys
from lns_jax import cli

def main():
  assert 'jax' not in sys.modules
  import jax
  import jax.numpy as jnp
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
  f = lambda x: jnp.sin(x) @ x
  return {'sum': float(jax.jit(f)(jnp.ones((8, 8)) / 3).sum()), 'hits': sum('cache_hits' in e for e in events)}

events = []
cli.run(main)
'''


def test_a_command_finds_what_an_earlier_one_compiled_also_when_it_is_damaged(tmp_path):
  """Three starts: compiles; finds the same numbers; and, with the files cut short, compiles in silence."""
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'JAX_PLATFORMS': 'cpu'}
  def start():
    run = subprocess.run([sys.executable, '-c', PROGRAM], capture_output=True, text=True, env=env, cwd=ROOT)
    assert run.returncode == 0 and not run.stderr, run.stderr
    return eval(run.stdout)
  first, second = start(), start()
  assert first['hits'] == 0 and second['hits'] > 0 and first['sum'] == second['sum']
  entries = list(tmp_path.rglob('*-cache'))
  for entry in entries:
    entry.write_bytes(entry.read_bytes()[:100])
  third = start()
  assert entries and third == first
