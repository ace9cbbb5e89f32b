"""What stands in the environment before jax is imported; native noise stays away from the user."""

import importlib.util
import os
import subprocess
import sys

import pytest

from lns_jax import host
from lns_jax.errors import UserError

LIBTPU = importlib.util.find_spec('libtpu') is not None


def chosen(tmp_path, libtpu: bool, **environment) -> str:
  """JAX_PLATFORMS of a process that leaves the TPU out; `libtpu`: whether a module of that name can be found."""
  (tmp_path / 'libtpu').mkdir()
  if libtpu:
    (tmp_path / 'libtpu' / '__init__.py').write_text('raise SystemExit("imported")')
  env = {k: v for k, v in os.environ.items() if k != 'JAX_PLATFORMS'} | {'PYTHONPATH': str(tmp_path)} | environment
  script = ('import importlib.util as u, os; from lns_jax import host; host.leave_out_tpu(); '
            'print(os.environ.get("JAX_PLATFORMS"))')
  run = subprocess.run([sys.executable, '-c', script], env=env, capture_output=True, text=True, check=True)
  return run.stdout.strip()


@pytest.mark.skipif(any(map(host._installed, host.GPU_PLUGINS)), reason='a GPU plugin is installed: jax chooses')
def test_with_libtpu_and_no_tpu_the_cpu_is_chosen_without_loading_it(tmp_path):
  assert chosen(tmp_path, True) == 'cpu'


def test_what_the_user_chose_stays(tmp_path):
  assert chosen(tmp_path, True, JAX_PLATFORMS='tpu,cpu') == 'tpu,cpu'


def test_a_tpu_stays(tmp_path, monkeypatch):
  (tmp_path / 'accel0').touch()
  monkeypatch.setattr(host, 'DEVICES', (f'{tmp_path}/accel*',))
  monkeypatch.setattr(host, '_installed', lambda module: module == 'libtpu')
  monkeypatch.delenv('JAX_PLATFORMS')
  host.leave_out_tpu()
  assert 'JAX_PLATFORMS' not in os.environ
  (tmp_path / 'accel0').unlink()
  host.leave_out_tpu()
  assert os.environ['JAX_PLATFORMS'] == 'cpu'


@pytest.mark.skipif(LIBTPU, reason='libtpu is installed')
def test_without_libtpu_one_sentence_says_how_to_get_it():
  with pytest.raises(UserError, match=r"pip install 'lns_jax\[tpu\]'"):
    host.compile_for_tpu()


def test_native_noise_is_kept_unless_what_made_it_fails(capfd):
  with host.without_stderr():
    os.write(2, b'noise\n')
  assert capfd.readouterr().err == ''
  with pytest.raises(ZeroDivisionError):
    with host.without_stderr():
      os.write(2, b'the cause\n')
      1 / 0
  os.write(2, b'later\n')
  assert capfd.readouterr().err == 'the cause\nlater\n'
