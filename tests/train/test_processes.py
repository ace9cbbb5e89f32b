"""One run on several processes: the numbers of one, one end for all, and a restart on any other number."""

import json
import os
import resource
import shutil
import signal
import time

import numpy as np
import pytest

import processes
from lns_jax.config import CheckpointConfig
from lns_jax.train import checkpoint, log, manifest

STEPS = 100  # enough for JAX's preemption service, which looks once a second
RUN = ['--config=quickstart:tiny', '--config.model.vocab_size=258', '--config.model.d_model=16',
       '--config.model.d_ff=32', '--config.model.num_layers=2', '--config.data.tokenizer=byte',
       '--config.data.validation_fraction=0.1', '--config.data.seq_len=128', f'--config.train.steps={STEPS}',
       '--config.train.batch_size=32', '--config.train.log_every=1', '--config.checkpoint.every=25',
       '--config.eval.every=50', '--config.eval.max_tokens=4000', '--config.train.tensorboard=False',
       '--config.optimizer.eps=1e-3', '--config.optimizer.lr=1e-3']  # rounding stays rounding


def start(workdir, cache, *more, **kwargs):
  text = cache / 'text'
  if not text.exists():  # our own sources as a small corpus
    shutil.copytree(processes.ROOT / 'lns_jax/layers', text, ignore=shutil.ignore_patterns('__pycache__'))
    for path in text.glob('*.py'):
      path.rename(path.with_suffix('.txt'))
  return processes.start('pretrain', [*RUN, f'--config.data.source={text}', f'--workdir={workdir}', *more], cache,
                         **kwargs)


def curve(workdir, key='loss'):
  return {r['step']: r[key] for r in log.read(workdir / 'metrics.jsonl') if key in r}


def result(found):
  assert [code for code, _, _ in found] == [0] * len(found), found
  assert [out.count('\n') for _, out, _ in found] == [1] + [0] * (len(found) - 1)  # process 0 speaks for all
  return json.loads(found[0][1])


def two_that_train(workdir, cache):
  """Two processes some steps into a run without an end."""
  children = start(workdir, cache, '--config.train.steps=100000', processes=2)
  processes.wait(children, lambda: len(curve(workdir)) >= 5)
  return children


def check_told(children, code: int, sentence: str, teller: int = 1):
  """Both end soon with the code: the teller with the sentence, the other one with what it was told of that."""
  began = time.monotonic()
  found = processes.ends(children)
  assert time.monotonic() - began < 15
  told = f'process {teller} of 2 ended: {sentence}'
  assert [(ended, last) for ended, _, last in found] == [(code, sentence if i == teller else told) for i in (0, 1)]


def check_same(workdir, whole):
  """Losses, tokens and evaluations of all steps, each step once."""
  for key in ('loss', 'grad_norm', 'tokens', 'val_loss'):
    ours, theirs = curve(workdir, key), curve(whole, key)
    assert list(ours) == list(theirs)
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-6 if key != 'grad_norm' else 1e-5)


@pytest.fixture(scope='module')
def whole(cache, tmp_path_factory):
  """The run as one process of one device."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  result(processes.ends(start(workdir, cache)))
  return workdir


def test_two_processes_train_as_one(cache, tmp_path):
  few = ('--config.train.steps=3', '--config.eval.every=0', '--config.eval.max_tokens=1000',
         '--config.checkpoint.every=0')
  result(processes.ends(start(tmp_path / 'two', cache, *few, processes=2)))
  result(processes.ends(start(tmp_path / 'one', cache, *few)))
  check_same(tmp_path / 'two', tmp_path / 'one')
  assert not list((tmp_path / 'two').glob('.shared*'))


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [
    {'sequence': 4, 'tensor': 2}, {'fsdp': 8}, {'data': 2, 'fsdp': 2, 'sequence': 2}], ids=str)
def test_rows_come_where_the_mesh_has_them(mesh, whole, cache, tmp_path):
  """Four processes of two devices: every row on all processes, on one device, or on one process."""
  axes = [f'--config.mesh.{axis}={size}' for axis, size in ({'data': 1} | mesh).items()]
  result(processes.ends(start(tmp_path / 'run', cache, *axes, processes=4, devices=2)))
  check_same(tmp_path / 'run', whole)


@pytest.mark.slow
@pytest.mark.parametrize('victim', [1, 0])
def test_a_killed_process_ends_the_others_and_the_restart_goes_on(victim, whole, cache, tmp_path):
  workdir = tmp_path / 'run'
  children = start(workdir, cache, processes=2)
  processes.wait(children, lambda: len(log.read(workdir / 'metrics.jsonl')) >= 6)
  children[victim].kill()
  began = time.monotonic()
  found = processes.ends(children)
  assert time.monotonic() - began < 15
  assert found[victim][0] == -signal.SIGKILL
  code, _, last = found[1 - victim]
  assert code == 75 and 'the same command on all hosts goes on from there' in last
  # whose error is seen first, of the data that it was to send or of the words of all, which process 0 carries
  assert last.startswith(('lost: another ', 'lost: process 0 of 2 ') if victim == 0 else 'lost: another ')
  result(processes.ends(start(workdir, cache, processes=2)))
  check_same(workdir, whole)


@pytest.mark.slow
@pytest.mark.parametrize('seconds', [0.0, 0.2, 0.5, 1.0])
def test_a_process_killed_before_the_first_step_is_lost_too(seconds, cache, tmp_path):
  children = start(tmp_path / 'run', cache, processes=2)
  assert all(f'process {i} of 2 has joined' in children[i].stderr.readline() for i in (0, 1))
  time.sleep(seconds)
  children[1].kill()
  code, _, said = processes.ends(children)[0]
  assert code == 75 and said.startswith('lost: another ')


@pytest.mark.slow
def test_sigterm_to_one_of_two_saves_the_same_step_on_both(whole, cache, tmp_path):
  workdir = tmp_path / 'run'
  children = start(workdir, cache, processes=2)
  processes.wait(children, lambda: len(log.read(workdir / 'metrics.jsonl')) >= 5)
  children[1].send_signal(signal.SIGTERM)
  found = processes.ends(children)
  assert [code for code, _, _ in found] == [75, 75]
  assert found[0][2] == found[1][2] and found[0][2].startswith('preempted: saved step ')
  result(processes.ends(start(workdir, cache, processes=2)))
  check_same(workdir, whole)


@pytest.mark.slow
@pytest.mark.parametrize('asked', [(1,), (0, 1)], ids=str)
def test_sigterm_in_an_evaluation_saves_the_same_step_on_both(asked, cache, tmp_path):
  long = ('--config.train.steps=12', '--config.eval.every=6', '--config.eval.max_tokens=1000000',
          '--config.eval.batch_size=2', '--config.data.validation_fraction=0.6')  # some hundred batches
  workdir, whole = tmp_path / 'run', tmp_path / 'whole'
  children = start(workdir, cache, *long, processes=2)
  processes.wait(children, lambda: max(curve(workdir), default=0) == 6)
  for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):  # no evaluation ends meanwhile
    for i in asked:
      children[i].send_signal(number)
  said = f'preempted: saved step 6 of 12 in {workdir}; the same command goes on from there.'
  assert [(code, last) for code, _, last in processes.ends(children)] == [(75, said)] * 2
  assert not curve(workdir, 'val_loss')
  result(processes.ends(start(workdir, cache, *long, processes=2)))
  result(processes.ends(start(whole, cache, *long)))
  check_same(workdir, whole)


@pytest.mark.slow
@pytest.mark.parametrize('victim, room, what', [
    (0, 20_000, 'checkpoints/20 could not be written'), (1, 20_000, 'checkpoints/20 could not be written'),
    (0, 0, 'could not be written')], ids=str)
def test_a_full_disk_of_one_ends_both_and_what_was_saved_stays(victim, room, what, cache, tmp_path):
  """Room for what grows line by line, but not for a checkpoint; and for nothing."""
  workdir = tmp_path / 'run'
  children = start(workdir, cache, '--config.train.steps=100000', '--config.eval.every=0', '--config.model.d_model=64',
                   '--config.model.d_ff=128', '--config.checkpoint.every=10', processes=2)
  processes.wait(children, (workdir / 'checkpoints/10/manifest.json').exists)
  resource.prlimit(children[victim].pid, resource.RLIMIT_FSIZE, (room, room))
  where = f'checkpoint {workdir}/' if room else f'{workdir} '
  check_told(children, 1, f'error: {where}{what}: File too large; earlier checkpoints are intact.', victim)
  with checkpoint.Checkpointer(workdir / 'checkpoints', CheckpointConfig()) as keeper:
    assert keeper.steps() == [10] and not manifest.damage(workdir / 'checkpoints/10')


@pytest.mark.slow
def test_an_end_that_fails_is_heard_by_one_that_is_done(cache, tmp_path):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  os.mkfifo(workdir / 'result.json.tmp')  # process 0 waits until we read what it writes, and finds that it is no file
  children = start(workdir, cache, '--config.train.steps=2', '--config.checkpoint.every=0', processes=2)
  processes.wait(children, lambda: curve(workdir, 'val_loss'))
  time.sleep(5)  # process 1 has nothing left to do
  with (workdir / 'result.json.tmp').open():
    check_told(children, 1, 'error: OSError: [Errno 22] Invalid argument', 0)


@pytest.mark.slow
def test_one_too_many_is_refused_and_the_others_go_on(cache, tmp_path):
  children = two_that_train(tmp_path / 'run', cache)
  try:
    port = next(x for x in children[0].args if x.startswith('--coordinator'))
    (code, _, last), = processes.ends(start(tmp_path / 'run', cache, port, '--processes=3', '--process=2'))
    assert code == 1 and last.startswith('error: process 2 of 3 could not join the others at localhost:')
    assert last.endswith('is --processes the same for all?')
    reached = max(curve(tmp_path / 'run'))
    processes.wait(children, lambda: max(curve(tmp_path / 'run')) > reached + 3)
  finally:
    for child in children:
      child.kill()
      child.communicate()


@pytest.mark.slow
def test_sigterm_before_the_first_step_ends_both_at_once(cache, tmp_path):
  workdir = tmp_path / 'run'
  children = start(workdir, cache, processes=2)
  processes.wait(children, (workdir / 'run_info.json').exists)  # it compiles now
  children[1].send_signal(signal.SIGTERM)
  check_told(children, 75, 'preempted: SIGTERM came before there was anything to save; the same command goes on.')
  assert not curve(workdir)


@pytest.mark.slow
@pytest.mark.parametrize('which', [0, 1])
def test_a_second_ctrl_c_only_ends_it_sooner(which, cache, tmp_path):
  """It comes while the process tells the others, which process 0 does for some seconds."""
  children = two_that_train(tmp_path / 'run', cache)
  children[which].send_signal(signal.SIGINT)
  time.sleep(1)
  children[which].send_signal(signal.SIGINT)
  began = time.monotonic()
  found = processes.ends(children, timeout=60)
  assert time.monotonic() - began < 15 and found[which][0] == 130, found


@pytest.mark.slow
def test_ctrl_c_to_one_of_two_ends_both(cache, tmp_path):
  children = two_that_train(tmp_path / 'run', cache)
  children[1].send_signal(signal.SIGINT)
  check_told(children, 130, 'interrupted; what was saved is intact, and the same command goes on from there.')


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(cache, tmp_path):
  """As the first one saves: another process, stopped, never comes to do so."""
  children = two_that_train(tmp_path / 'run', cache)
  children[0].send_signal(signal.SIGSTOP)
  for _ in range(2):
    children[1].send_signal(signal.SIGTERM)
    time.sleep(2)
  assert children[1].poll() == 75
  children[0].send_signal(signal.SIGCONT)
  assert [code for code, _, _ in processes.ends(children)] == [75, 75]


@pytest.mark.slow
def test_a_process_that_hangs_counts_as_lost_within_a_minute(cache, tmp_path):
  children = two_that_train(tmp_path / 'run', cache)
  children[1].send_signal(signal.SIGSTOP)
  began = time.monotonic()
  first, = processes.ends(children[:1])
  assert time.monotonic() - began < 60 and first[0] == 75 and first[2].startswith('lost: another ')
  children[1].send_signal(signal.SIGCONT)
  second, = processes.ends(children[1:])
  assert second[0] == 75 and second[2].startswith('lost: ')


@pytest.mark.slow
@pytest.mark.parametrize('axes', [{'data': 2, 'stage': 2}, {'data': 2, 'fsdp': 2}], ids=str)
def test_a_run_on_a_mesh_over_processes_ends_on_one_device(axes, whole, cache, tmp_path):
  workdir = tmp_path / 'run'
  children = start(workdir, cache, *(f'--config.mesh.{axis}={size}' for axis, size in axes.items()), processes=2,
                   devices=2)
  processes.wait(children, lambda: len(curve(workdir)) >= 3)
  children[0].send_signal(signal.SIGTERM)
  assert [code for code, _, _ in processes.ends(children)] == [75, 75]
  result(processes.ends(start(workdir, cache)))
  check_same(workdir, whole)


@pytest.mark.slow
def test_numbers_that_are_not_finite_end_all(cache, tmp_path):
  found = processes.ends(start(tmp_path / 'run', cache, '--config.optimizer.lr=1e30', processes=2))
  assert [code for code, _, _ in found] == [1, 1]
  first, second = (last.split(' ended: ')[-1] for _, _, last in found)  # which of them tells the other
  assert 'are not both finite, first in ' in first and first == second


@pytest.mark.slow
def test_folders_that_are_not_shared_are_refused(cache, tmp_path):
  a, = start(tmp_path / 'a', cache, processes=2, only=[0])
  port = next(x for x in a.args if x.startswith('--coordinator'))
  b, = start(tmp_path / 'b', cache, port, '--processes=2', '--process=1')
  (first, _, said), (second, _, own) = processes.ends([a, b])
  assert (first, second) == (1, 1) and said == f'process 1 of 2 ended: {own}'
  assert own.startswith('error: process 1 does not see what process 0 writes in ')


@pytest.mark.slow
def test_two_processes_evaluate_as_one(whole, cache):
  one, two = (result(processes.ends(processes.start('evaluate', [f'--workdir={whole}'], cache, processes=n)))
              for n in (1, 2))
  assert two == pytest.approx(one, rel=1e-6)


@pytest.mark.slow
def test_two_processes_then_four_then_one_are_one_run(whole, cache, tmp_path):
  workdir = tmp_path / 'run'
  for count, more in ((2, 3), (4, 3)):
    reached = max(curve(workdir), default=0) + more
    children = start(workdir, cache, processes=count)
    processes.wait(children, lambda: max(curve(workdir), default=0) >= reached)
    children[0].send_signal(signal.SIGTERM)
    assert [code for code, _, _ in processes.ends(children)] == [75] * count
  result(processes.ends(start(workdir, cache)))
  check_same(workdir, whole)


@pytest.mark.slow
@pytest.mark.parametrize('flag, words', [
    ('--config.data.source={}/other', 'has rows with hash'),
    ('--config.train.steps=12', 'was started with train.steps = 12 and process 0 with 100; start all with the same'),
    ('--config.optimizer.lr=0.5', 'was started with optimizer.lr = 0.5 and process 0 with 0.001; '),
    ('--config.model.num_layers=6', 'was started with model.')])
def test_an_error_of_one_is_told_to_all(flag, words, cache, tmp_path):
  """Process 1 asks for something else than process 0."""
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'a.txt').write_text('Another text.\n' * 5000)
  a, = start(tmp_path / 'run', cache, processes=2, only=[0])
  port = next(x for x in a.args if x.startswith('--coordinator'))
  b, = start(tmp_path / 'run', cache, flag.format(tmp_path), port, '--processes=2', '--process=1')
  (first, _, said), (second, _, own) = processes.ends([a, b], timeout=120)
  assert (first, second) == (1, 1)
  assert own.startswith(f'error: process 1 {words}') and said == f'process 1 of 2 ended: {own}'


@pytest.mark.slow
@pytest.mark.parametrize('index, words', [
    (0, 'error: 1 of 2 processes have come after 3 s'), (1, 'error: process 0 of 2 does not answer at localhost:')])
def test_who_is_alone_says_who_is_missing(index, words, cache, tmp_path):
  child, = start(tmp_path / 'run', cache, '--join_timeout=3', processes=2, only=[index])
  (code, _, last), = processes.ends([child])
  assert code == 1 and last.startswith(words) and 'one host alone' in last and 'firewall' in last
  assert not (tmp_path / 'run').exists()
