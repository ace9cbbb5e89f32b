"""The command line as its user meets it: real processes, exit codes, one sentence, nothing started."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PRETRAIN = 'experiments/pretrain.py'


def command(script, *arguments, timeout=60):
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return subprocess.run([sys.executable, str(ROOT / script), *map(str, arguments)], capture_output=True, text=True,
                        timeout=timeout, env=env, cwd='/')


@pytest.mark.parametrize('script', sorted(p.name for p in (ROOT / 'experiments').glob('[a-z]*.py')))
def test_help_is_quick_and_ends_with_0(script):
  start = time.perf_counter()
  run = command(f'experiments/{script}', '--help')
  assert run.returncode == 0 and time.perf_counter() - start < 3
  assert script in run.stdout


def test_help_lists_every_setting():
  text = command(PRETRAIN, '--help').stdout
  for word in ('--config.model.scheme', "'pre'", 'llama_130m', '--workdir', '--config.optimizer.warmup_steps=0'):
    assert word in text


@pytest.mark.parametrize('arguments, words', [
    ([], ['--config', 'must be given']),
    (['--config=quickstart'], ['--workdir', 'must be given']),
    (['--config=quickstart:tinny'], ["'tinny'", "'tiny'"]),
    (['--config=llama_130'], ["'llama_130'", "'llama_130m'"]),
    (['--config=nowhere/x.py'], ['nowhere/x.py', 'does not exist']),
    (['--config=quickstart', '--config.model.schme=lns'], ['schme', "'scheme'"]),
    (['--config=quickstart', '--config.modl.scheme=lns'], ['modl', "'model'"]),
    (['--config=quickstart', '--config.lrr=2'], ['lrr']),
    (['--config=quickstart', '--config.model=lns'], ['group', 'scheme']),
    (['--config=quickstart', '--confg.model.scheme=lns'], ['confg', "'config'"]),
    (['--config=quickstart', '--workdr=x'], ['workdr', "'workdir'"]),
    (['--config=quickstart', '--config.model.scheme=lnss'], ["'lnss'", "'lns'", 'mix']),
    (['--config=quickstart', '--config.optimizer.lr=nan'], ['optimizer.lr', 'finite']),
    (['--config=quickstart', '--config.optimizer.lr=-1'], ['optimizer.lr', 'above']),
    (['--config=quickstart', '--config.train.steps=1.5'], ['steps', '1.5']),
    (['--config=quickstart', '--config.optimizer.warmup_steps=9999'], ['warmup_steps', '9999']),
    (['--config=quickstart', '--config.model.num_heads=3'], ['num_heads', '3', '64']),
    (['--config=quickstart', 'stray'], ["'stray'", '--name=value']),
    (['--config.model.scheme=lns'], ['--config', 'must be given']),
])
def test_a_mistake_is_one_sentence_and_starts_nothing(arguments, words, tmp_path):
  workdir = tmp_path / 'run'
  needs = any(a.startswith('--config=') for a in arguments) and 'must be given' not in words
  run = command(PRETRAIN, *arguments, *([f'--workdir={workdir}'] if needs else []))
  assert run.returncode == 1 and not workdir.exists() and not run.stdout
  (line,) = run.stderr.strip().splitlines()
  assert line.startswith('error: ')
  for word in words:
    assert word in line, line


def test_an_override_before_the_config_and_a_space_after_the_name_are_accepted(tmp_path):
  run = command(PRETRAIN, '--config.model.scheme', 'lnss', '--config', 'quickstart', '--workdir', tmp_path / 'run')
  assert "'lnss'" in run.stderr and run.returncode == 1


def test_an_unknown_key_in_a_config_file_is_refused(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text('from ml_collections import config_dict\n'
                  'def get_config():\n  return config_dict.ConfigDict({"optim": {"wdd": 1.0}})\n')
  run = command(PRETRAIN, f'--config={file}', f'--workdir={tmp_path / "run"}')
  assert run.returncode == 1 and "'optimizer'" in run.stderr and len(run.stderr.strip().splitlines()) == 1


def test_a_config_file_with_a_mistake_of_its_own_is_named_with_it(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text('def get_config():\n  return undefined\n')
  run = command(PRETRAIN, f'--config={file}', f'--workdir={tmp_path / "run"}')
  assert run.returncode == 1
  assert run.stderr.strip() == "error: the config file raised NameError: name 'undefined' is not defined"


def test_help_may_be_cut_short_by_its_reader():
  program = subprocess.Popen([sys.executable, str(ROOT / PRETRAIN), '--help'], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
  program.stdout.close()
  assert program.stderr.read() == '' and program.wait(timeout=60) == 0


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  run = command(PRETRAIN, '--config=quickstart:tiny', f'--workdir={tmp_path}/file/run')
  assert run.returncode == 1 and 'cannot be used as --workdir' in run.stderr


def test_evaluate_and_compare_say_what_is_missing(tmp_path):
  assert 'not a run folder' in command('experiments/evaluate.py', f'--workdir={tmp_path}').stderr
  assert 'run folders' in command('experiments/compare.py').stderr
  run = command('experiments/compare.py', tmp_path, tmp_path)
  assert run.returncode == 1 and 'run_info.json' in run.stderr


def test_a_model_of_images_without_images_is_told_what_there_is(tmp_path):
  run = command('experiments/vision.py', '--config=vit_s16', f'--workdir={tmp_path}')
  assert run.returncode == 1 and 'data.source must be given' in run.stderr and '.npz' in run.stderr


def test_the_last_line_is_one_json_object_without_nan():
  code = ('from lns_jax import cli\n'
          'from absl import flags\n'
          'cli.run(lambda: print("table") or {"a": 1.5, "b": None})\n')
  run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
  assert json.loads(run.stdout.splitlines()[-1]) == {'a': 1.5, 'b': None} and run.returncode == 0


@pytest.mark.parametrize('arguments, words', [
    (['--config=quickstart'], ['model.family = decoder', 'pretrain.py']),
    (['--config=vit_tiny', '--config.model.rope_base=5e5'], ['rope_base', 'model.family = decoder', 'pooling']),
    (['--config=vit_tiny:digit'], ["'digit'", "'digits'"]),
    (['--config=vit_tiny', '--config.model.patch_size=5'], ['patch_size = 5', '28', '4 or 7 would']),
])
def test_a_mistake_with_images_is_one_sentence_and_starts_nothing(arguments, words, tmp_path):
  run = command('experiments/vision.py', *arguments, f'--workdir={tmp_path / "run"}')
  assert run.returncode == 1 and not (tmp_path / 'run').exists()
  line, = run.stderr.strip().splitlines()
  assert all(w in line for w in words)


def test_ctrl_c_ends_the_command_while_something_still_runs():
  # a compiled program on the device goes on like this thread, and an orderly exit waits for it
  program = '''
import threading, time
from lns_jax import cli
def main():
  threading.Thread(target=time.sleep, args=(60,)).start()
  raise KeyboardInterrupt
cli.run(main, interrupted='nothing is kept')
'''
  start = time.perf_counter()
  result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=50)
  assert result.returncode == 130 and result.stderr == 'interrupted; nothing is kept.\n'
  assert time.perf_counter() - start < 30


def test_nothing_that_a_command_reads_before_its_main_imports_jax():
  """So that --help is quick, and what must stand in the environment before jax can still be put there."""
  script = "import sys; from lns_jax import cli, presets; presets.load_config('quickstart'); print('jax' in sys.modules)"
  run = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True)
  assert run.stdout == 'False\n'
