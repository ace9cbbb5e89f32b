"""The scripts for Cloud TPU against a gcloud that records its arguments and plays what is in a file."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

FOLDER = pathlib.Path(__file__).parent.parent.parent / 'experiments' / 'launch'
SCRIPTS = ('tpu_vm.sh', 'pod_slice.sh', 'queued_spot.sh', 'gke_xpk.sh')
RUN = ['--', 'python', 'experiments/pretrain.py', '--config=llama_130m', "--config.model.scheme=it's", 'a  b $HOME']
PLAYER = r'''#!/bin/bash
cd "$STAGE" || exit
{ printf '%s\x1f' "${0##*/}" "$@"; printf '\x1e'; } >> calls
play() {  # the next of a file's words between commas; the last one stays
  all=$(< "$1"); printf '%s' "${all#*,}" > "$1"; first=${all%%,*}; echo ${first}
}
case "$*" in
  *'queued-resources create'*)
    for name in states jobs; do  # of this launch; those of the next stand behind a slash
      all=$(< $name); printf '%s' "${all%%/*}" > $name.now; printf '%s' "${all#*/}" > $name
    done ;;
  *'queued-resources delete'*) rm states.now ;;
  *'queued-resources describe'*) [[ -e states.now ]] && play states.now ;;
  *'tpu-vm describe'*) [[ -e node ]] ;;
  *'job: '*) [[ ! -e states.now ]] || for word in $(play jobs.now); do echo "job: $word"; done ;;
  *'uv pip'*) [[ ! -e broken ]] ;;
  *scp*) [[ ! -e home ]] || cp "$5" home/ ;;
  *job.pid*) [[ ! -e home ]] || for argument; do
    [[ $argument != --command=* ]] || HOME=$STAGE/home bash -c "${argument#--command=}"
  done ;;
  *tail*) echo 'error: the last line of the log' ;;
esac
'''


@pytest.fixture
def stage(tmp_path):
  """stage(script, *arguments, states=, jobs=): the finished process and the calls of gcloud and xpk.

  `states` are what gcloud says of a queued resource, one a look, `jobs` what the hosts say of the command; those of
  the next launch stand behind a slash, and the last one stays.
  """
  for name, text in (('gcloud', PLAYER), ('xpk', PLAYER), ('git', '#!/bin/sh\n')):
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  def perform(script, *arguments, states='ACTIVE', jobs='none, 0', **env):
    (tmp_path / 'states').write_text(states)
    (tmp_path / 'jobs').write_text(jobs)
    (tmp_path / 'calls').write_text('')
    command = ['bash', str(FOLDER / script), *arguments] if script else ['bash', '-e', '-c', *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60,
                          env=os.environ | {'PATH': f"{tmp_path}:{os.environ['PATH']}", 'STAGE': str(tmp_path)} | env)
    return done, [call.split('\x1f')[:-1] for call in (tmp_path / 'calls').read_text().split('\x1e')[:-1]]
  return perform


def verbs(calls) -> list[str]:
  """What was asked of gcloud, without looks at states; of ssh, what for."""
  found = []
  for call in calls:
    command = next((a for a in call if a.startswith('--command=')), '')
    what = 'install' if 'uv pip' in command else 'start' if 'setsid' in command else 'tail' if 'tail' in command else ''
    if 'describe' not in call and 'job: ' not in command:
      found.append(what or call[4])
  return found


WHERE = ('--name=n', '--zone=z', '--type=v5litepod-16')
LAUNCH = ['create', 'scp', 'install', 'start']


@pytest.mark.parametrize('script', [*SCRIPTS, 'common.sh'])
def test_every_script_is_sound_bash(script):
  subprocess.run(['bash', '-n', str(FOLDER / script)], check=True)
  here = shutil.which('shellcheck') or shutil.which('shellcheck', path=pathlib.Path(sys.executable).parent)
  if here is None:
    pytest.skip('shellcheck is not installed')
  found = subprocess.run([here, '--external-sources', str(FOLDER / script)], capture_output=True, text=True,
                         cwd=FOLDER.parent.parent)
  assert found.returncode == 0, found.stdout


@pytest.mark.parametrize('script', SCRIPTS)
def test_help_names_every_option(script, stage):
  done, calls = stage(script, '--help')
  assert done.returncode == 0 and not calls and script in done.stdout and '--dry_run' in done.stdout
  valued, switches = (FOLDER / script).read_text().split("\nparse '")[1].splitlines()[0].split("' '")
  for option in [*valued.split(), *switches.split("'")[0].split()]:
    assert f'--{option}' in done.stdout


@pytest.mark.parametrize('script, arguments, words', [
    ('tpu_vm.sh', ['--zone=z', '--type=v5litepod-8', *RUN], ['--name', 'LAUNCH_NAME', 'must be given']),
    ('tpu_vm.sh', ['--name=n', '--zone=z', '--type=v5litepod-8'], ['the command', '--']),
    ('tpu_vm.sh', [*WHERE, *RUN], ['v5litepod-16', 'pod_slice.sh']),
    ('tpu_vm.sh', [*WHERE, '--zonne=z', *RUN], ['--zonne', '--help']),
    ('pod_slice.sh', [*WHERE, '--keep', *RUN], ['--keep', '--help']),
    ('pod_slice.sh', [*WHERE, 'python'], ["'python'", '--']),
    ('pod_slice.sh', ['--name=n', '--zone=z', '--type=v9-16', *RUN], ['v9-16', '--runtime']),
    ('queued_spot.sh', ['--name=n', '--zone=z', '--type=v9-16', *RUN], ['v9-16', '--runtime']),
    ('queued_spot.sh', [*WHERE, '--relaunches=many', *RUN], ['--relaunches=many', 'whole number']),
    ('gke_xpk.sh', [], ['cluster', 'workload']),
    ('gke_xpk.sh', ['cluster', '--zone=z', '--type=t'], ['--cluster', 'LAUNCH_CLUSTER']),
    ('gke_xpk.sh', ['workload', '--cluster=c', '--zone=z', '--type=t', *RUN], ['--name']),
    ('gke_xpk.sh', ['cluster', '--cluster=c', '--zone=z', '--type=v5e-4'], ['v5e-4', 'v5litepod-4']),
    ('tpu_vm.sh', ['--name=n', '--zone=z', '--type=v5e-4', *RUN], ['v5e-4', 'v5litepod-4']),
    ('queued_spot.sh', ['--name=n', '--zone=z', '--type=v5e-16', *RUN], ['v5e-16', 'v5litepod-16']),
    ('gke_xpk.sh', ['cluster', '--cluster=c', '--zone=z', '--type=t', '--spot', '--reservation=r'], ['exclude']),
])
def test_a_mistake_is_one_sentence_and_asks_nothing_of_gcloud(script, arguments, words, stage):
  done, calls = stage(script, *arguments)
  assert done.returncode == 1 and not [c for c in calls if 'describe' not in c] and not done.stdout
  (line,) = done.stderr.splitlines()
  for word in ('error: ', *words):
    assert word in line


@pytest.mark.parametrize('script, arguments', [
    ('tpu_vm.sh', ['--name=n', '--zone=z', '--type=v5litepod-8']), ('pod_slice.sh', WHERE),
    ('queued_spot.sh', ['--poll=0', *WHERE]),
    ('gke_xpk.sh', ['workload', '--cluster=c', '--zone=z', '--type=v6e-64', '--name=n'])])
def test_a_dry_run_prints_the_commands_of_the_real_one_and_runs_none(script, arguments, stage):
  def asked(calls):
    return [[re.sub(r'/tmp\S*gz', 'ARCHIVE', a) for a in c] for c in calls
            if 'describe' not in c and not any('job: ' in a for a in c)]
  dry, nothing = stage(script, *arguments, '--dry_run', *RUN)
  assert dry.returncode == 0 and nothing == []
  _, printed = stage('', dry.stdout, jobs='none')
  _, real = stage(script, *arguments, *RUN)
  assert asked(printed) == asked(real) and real


@pytest.mark.parametrize('kind, runtime', [
    ('v5litepod-8', 'v2-alpha-tpuv5-lite'), ('v6e-1', 'v2-alpha-tpuv6e'), ('v5p-8', 'v2-alpha-tpuv5'),
    ('v4-8', 'tpu-ubuntu2204-base')])
def test_a_machine_gets_the_runtime_of_its_type_and_one_that_exists_is_used(kind, runtime, stage, tmp_path):
  arguments = ['--name=n', '--zone=z', '--project=p', f'--type={kind}', *RUN]
  done, calls = stage('tpu_vm.sh', *arguments)
  assert done.returncode == 0 and verbs(calls) == LAUNCH
  assert calls[1] == ['gcloud', 'compute', 'tpus', 'tpu-vm', 'create', 'n', f'--accelerator-type={kind}',
                      f'--version={runtime}', '--zone=z', '--project=p']
  assert all('--zone=z' in c and '--project=p' in c for c in calls)
  (tmp_path / 'node').touch()
  _, calls = stage('tpu_vm.sh', *arguments)
  assert verbs(calls) == LAUNCH[1:]


def test_a_slice_is_installed_and_started_on_all_hosts_and_settings_come_from_the_environment(stage):
  done, calls = stage('pod_slice.sh', '--type=v6e-64', *RUN, LAUNCH_NAME='n', LAUNCH_ZONE='z', LAUNCH_SPOT='1',
                      LAUNCH_SETUP='sudo mount share', LAUNCH_RUNTIME='mine')
  assert done.returncode == 0 and verbs(calls) == LAUNCH
  assert '--spot' in calls[1] and '--version=mine' in calls[1] and not any('--project' in a for c in calls for a in c)
  assert all('--worker=all' in c for c in calls[2:])
  assert any(a.endswith('\nsudo mount share') for a in calls[3])


SPOT = ['--poll=0', *WHERE, *RUN]


@pytest.mark.parametrize('states, jobs, launches, code', [
    ('WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE', 'none, running, running running, 0', 1, 0),
    ('ACTIVE', 'none, running, 0 running, 0 0', 1, 0),
    ('ACTIVE, ACTIVE, SUSPENDED / ACTIVE', 'none, running / none, 0', 2, 0),  # taken away
    ('ACTIVE, PREEMPTED / ACTIVE', 'none, running / none, 0', 2, 0),
    ('ACTIVE', 'none, running, 75 / none, running, 75 / none, 0', 3, 0),  # saved, and gone on with
    ('ACTIVE', 'none, lost / none, 0', 2, 0),  # a host started anew
    ('ACTIVE', 'none, / none, 0', 2, 0),  # nobody answers
    ('ACTIVE', 'none, running, 1', 1, 1),
    ('ACTIVE', 'none, 75 1 75', 1, 1),  # an error on one host ends the others with 75
    ('ACTIVE', 'none, 75 137 / none, 0', 2, 0),
    ('ACTIVE', 'none, 143 143 / none, 0', 2, 0),  # taken before Python was there to say so
    ('ACTIVE', 'none, 137', 1, 137),
    ('ACTIVE', 'none, 75 / none, 75 / none, 75 / none, 75 / none, 75', 4, 75),  # the bound
])
def test_spot_tpus_are_asked_for_again_until_the_command_ends(states, jobs, launches, code, stage):
  done, calls = stage('queued_spot.sh', '--relaunches=3', *SPOT, states=states, jobs=jobs)
  assert done.returncode == code, done.stderr
  shown = ['tail'] * (code not in (0, 75))
  assert verbs(calls) == (LAUNCH + ['delete']) * (launches - 1) + LAUNCH + shown + ['delete']
  assert ('the last line of the log' in done.stderr) == bool(shown)
  assert len({next(a for a in c if 'setsid' in a) for c in calls if any('setsid' in a for a in c)}) == 1
  created = [c[5:] for c in calls if c[3:5] == ['queued-resources', 'create']]
  assert created == [['n', '--node-id=n', '--accelerator-type=v5litepod-16', '--runtime-version=v2-alpha-tpuv5-lite',
                      '--spot', '--zone=z']] * launches


def test_spot_tpus_that_never_come_are_asked_for_again(stage):
  done, calls = stage('queued_spot.sh', *SPOT, states='WAITING_FOR_RESOURCES, FAILED / ACTIVE', jobs='- / none, 0')
  assert done.returncode == 0 and verbs(calls) == ['create', 'delete', *LAUNCH, 'delete']


def test_hosts_that_cannot_be_set_up_are_no_preemption(stage, tmp_path):
  (tmp_path / 'broken').touch()
  done, calls = stage('queued_spot.sh', *SPOT, jobs='none')
  assert done.returncode == 1 and verbs(calls) == ['create', *['scp', 'install'] * 3, 'tail', 'delete']
  done, calls = stage('pod_slice.sh', *WHERE, *RUN)
  assert done.returncode == 1 and verbs(calls) == ['create', 'scp', 'install']
  assert 'could not be set up' in done.stderr and 'tpu-vm delete n --zone=z' in done.stderr


@pytest.mark.parametrize('script, arguments', [
    ('tpu_vm.sh', ['--name=n', '--zone=z', '--type=v4-8', *RUN]), ('queued_spot.sh', SPOT),
    ('gke_xpk.sh', ['cluster', '--cluster=c', '--zone=z', '--type=v4-8'])])
def test_without_the_vendors_tools_one_sentence_says_so(script, arguments, stage, tmp_path):
  (tmp_path / 'bin').mkdir()
  for tool in ('bash', 'dirname', 'sed', 'basename'):
    (tmp_path / 'bin' / tool).symlink_to(shutil.which(tool))
  done, _ = stage(script, *arguments, PATH=str(tmp_path / 'bin'))
  assert done.returncode == 1 and re.fullmatch(r'error: (gcloud|xpk) is not installed .*\n', done.stderr)


def test_a_launcher_that_is_started_anew_goes_on_with_what_runs(stage, tmp_path):
  (tmp_path / 'states.now').write_text('ACTIVE')
  (tmp_path / 'jobs.now').write_text('running, running, 0')
  done, calls = stage('queued_spot.sh', '--keep', *SPOT)
  assert done.returncode == 0 and verbs(calls) == []


def test_a_command_outlives_its_connection_and_leaves_log_and_code(stage, tmp_path):
  """The host's part, run here: the checkout is what arrives, quotes and spaces as they were written."""
  (tmp_path / 'git').unlink()
  (tmp_path / 'home' / 'lns_jax').mkdir(parents=True)
  words = ["it's", 'two  words', '$HOME', '"']
  done, _ = stage('pod_slice.sh', *WHERE, '--', 'python3', '-c', 'import sys; print(sys.argv[1:]); sys.exit(75)', *words)
  assert done.returncode == 0
  (archive,) = (tmp_path / 'home').glob('*.tar.gz')
  assert {'setup.py', 'experiments/pretrain.py', 'configs/llama_130m.py'} <= set(tarfile.open(archive).getnames())
  assert written(tmp_path / 'home' / 'job.code') == '75\n'
  assert (tmp_path / 'home' / 'job.log').read_text() == f'{words}\n'


def test_a_host_that_shuts_down_lets_the_command_save_and_notes_its_code(stage, tmp_path):
  (tmp_path / 'home' / 'lns_jax').mkdir(parents=True)
  saves = 'trap "sleep 0.2; exit 75" TERM; touch ~/ready; while true; do sleep 0.05; done'
  stage('pod_slice.sh', *WHERE, '--', 'bash', '-c', saves)
  written(tmp_path / 'home' / 'ready')
  os.killpg(int((tmp_path / 'home' / 'job.pid').read_text()), signal.SIGTERM)
  assert written(tmp_path / 'home' / 'job.code') == '75\n'


def written(path: pathlib.Path) -> str:
  """What a file holds, once it is there."""
  deadline = time.monotonic() + 60
  while not path.exists() and time.monotonic() < deadline:
    time.sleep(0.02)
  time.sleep(0.1)
  return path.read_text()


def test_a_workload_is_restarted_when_it_was_preempted(stage):
  where = ['--cluster=c', '--zone=z', '--type=v5litepod-16', '--slices=2']
  _, (call,) = stage('gke_xpk.sh', 'cluster', *where, '--spot')
  assert call == ['xpk', 'cluster', 'create', '--cluster=c', '--tpu-type=v5litepod-16', '--num-slices=2', '--zone=z',
                  '--spot']
  _, (call,) = stage('gke_xpk.sh', 'workload', *where, '--name=w', *RUN)
  for word in ('--workload=w', '--restart-on-exit-codes=75', '--max-restarts=20', '--num-slices=2'):
    assert word in call
  command = next(a for a in call if a.startswith('--command='))
  assert command.startswith("--command=pip install --quiet -e '.[tpu,gcs]' && exec python ")
  assert subprocess.run(['bash', '-c', command.partition('&&')[2].replace('python', 'printf "%s\\n"', 1)],
                        capture_output=True, text=True).stdout.splitlines() == RUN[2:]
