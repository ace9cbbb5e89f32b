"""Making the table of schemes: real processes, resumed, refused, preempted, killed."""

import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.reproduce import crew, items, job, plan, records, schemes
from lns_jax.reproduce.plan import Spec

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def short(monkeypatch):
  """A table of three runs, each of two updates."""
  name, changes = schemes.SCALES['tiny']
  short = changes | {'train': {'steps': 2, 'batch_size': 8}, 'optimizer': {'warmup_steps': 1}}
  short['eval'] = {'every': 0, 'max_tokens': 1024}
  monkeypatch.setitem(schemes.SCALES, 'tiny', (name, short))
  for constant, value in (('SEEDS', 1), ('MORE_SEEDS', 1), ('BEYOND', 0)):
    monkeypatch.setattr(plan, constant, value)


def run_folders(workdir) -> list[pathlib.Path]:
  return sorted((workdir / 'runs').iterdir())


def table(workdir, **changes) -> schemes.Table:
  values = {'scale': 'tiny', 'base': schemes.base('tiny', {}), 'arms': plan.arms(), 'chosen': ['pre'],
            'workdir': workdir, 'places': [[]]}
  return schemes.Table(**values | changes)


@pytest.mark.parametrize('item, scale, words', [
    ('table99', 'cpu', ['table99', 'schemes']), ('schemes', 'gpu', ["'gpu'", 'cpu, tiny, tpu'])])
def test_an_unknown_item_or_scale_is_refused(item, scale, words):
  with pytest.raises(UserError) as e:
    items.check(item, scale)
  assert all(w in str(e.value) for w in words)


def test_an_unknown_scheme_is_refused_before_anything_is_made(tmp_path):
  with pytest.raises(UserError, match="'lnss'.*Did you mean 'lns'.*post"):
    items.reproduce('schemes', 'cpu', tmp_path / 'table', names=['lnss'])
  assert not (tmp_path / 'table').exists()


def test_no_name_is_not_all_names():
  for names in ([], ['']):
    with pytest.raises(UserError, match='--schemes names no row'):
      schemes.choose(names)


def test_pre_is_always_run_and_the_order_is_the_tables():
  assert schemes.choose(['post', 'lns']) == ['pre', 'lns', 'post'] and schemes.choose(None) == list(plan.arms())


def test_more_jobs_than_processors_are_refused(tmp_path):
  with pytest.raises(UserError, match='--jobs=4096 is more than the'):
    schemes.reproduce('tiny', tmp_path / 'table', jobs=4096)
  with pytest.raises(UserError, match='one job at a time'):
    schemes.reproduce('tpu', tmp_path / 'table', jobs=2)


@pytest.mark.parametrize('scale', schemes.SCALES)
def test_runs_differ_in_arm_rate_and_seeds_alone(scale, tmp_path):
  of = table(tmp_path, base=schemes.base(scale, {'data_dir': 'c4'}))
  a, b = (config_lib.to_dict(of.config(s)) for s in (Spec('pre', 8e-3, 0), Spec('lns_attn_only', 4e-3, 3)))
  from lns_jax.train import resume
  assert resume.differences(a, b) == {
      'model.scheme': ('pre', 'lns'), 'model.p_mlp': (0.5, 0.0), 'optimizer.lr': (8e-3, 4e-3),
      'train.seed': (0, 3), 'data.seed': (0, 3)}
  assert a['train']['layer_stats_every'] == of.base.train.steps and a['data']['data_dir'] == 'c4'


@pytest.mark.slow
def test_a_small_table_is_made_and_a_second_call_runs_nothing(short, tmp_path, monkeypatch):
  line = schemes.reproduce('tiny', tmp_path, names=['pre'], only='train')
  assert line['runs'] == 3 and line['diverged_runs'] == 0
  assert [f.name for f in run_folders(tmp_path)] == [f'pre_lr{r}_seed0' for r in ('0.004', '0.008', '0.016')]
  assert {p.name for p in tmp_path.glob('schemes.*')} == {'schemes.json', 'schemes.md'}  # no picture without a difference
  written = json.loads((tmp_path / 'schemes.json').read_text())
  (row,) = written['rows']
  assert row['common']['mean'] == json.loads((tmp_path / 'runs/pre_lr0.008_seed0/result.json').read_text())['loss']
  assert row['last_variance'] > 0 and written['missing_runs'] == 0
  assert [f.name for f in run_folders(tmp_path)[0].glob('checkpoints/[0-9]*')] == ['2']  # a run keeps its last alone

  start, started = crew._start, []
  monkeypatch.setattr(crew, '_start', lambda job, *args: started.append(job.name) or start(job, *args))
  assert schemes.reproduce('tiny', tmp_path, names=['pre'], only='train') == line and not started
  # A damaged record is asked for again, and the finished run answers at once with the same numbers.
  record = tmp_path / 'runs/pre_lr0.004_seed0/record.json'
  before = json.loads(record.read_text())
  record.write_text('{"arm": "pre"')
  assert schemes.reproduce('tiny', tmp_path, names=['pre'], only='train') == line
  assert started == ['pre_lr0.004_seed0']
  after = json.loads(record.read_text())
  assert {k: after[k] for k in ('loss', 'variance', 'config')} == {k: before[k] for k in ('loss', 'variance', 'config')}


@pytest.mark.slow
def test_a_diverged_run_is_a_record_without_a_loss(short, tmp_path, cache):
  config = config_lib.to_dict(table(tmp_path).config(Spec('post', 1e38, 0)))
  said = {'arm': 'post', 'rate': 1e38, 'seed': 0, 'cores': 1}
  found = job.train(config, str(tmp_path / 'runs/post_lr1e+38_seed0'), said)
  assert found['diverged'] and found['loss'] is None and 'not both finite' in found['reason']
  spec = Spec('post', 1e38, 0)
  record = records.read(tmp_path / 'runs' / spec.name)
  assert schemes.losses({spec: record}) == {spec: math.inf}


def test_a_job_that_fails_is_named_with_its_last_line(tmp_path):
  with pytest.raises(UserError, match="bad ended with code 1: KeyError: 'dance'; its log is .*log.txt"):
    done = []
    crew.work(lambda: [crew.Job('bad', tmp_path, {'kind': 'dance'})], done.append, [[]], cache=tmp_path)
  assert not done


def test_processors_are_shared_out_evenly():
  usable = sorted(os.sched_getaffinity(0))
  assert crew.processors(1) == [[]]
  places = crew.processors(len(usable))
  assert places == [[c] for c in usable] or len(usable) == 1


def record_of(of: schemes.Table, spec: Spec, **changes) -> dict:
  return dataclasses.asdict(spec) | {'config': config_lib.to_dict(of.config(spec)), 'cores': of.cores, 'loss': 4.0,
                                     'diverged': False, 'corpus_hash': 'a' * 64, 'tokens': 9, 'commit': 'c',
                                     'params': 1, 'variance': [1.0, 2.0]} | changes


def write(of: schemes.Table, record: dict):
  folder = of.workdir / 'runs' / Spec(record['arm'], record['rate'], record['seed']).name
  folder.mkdir(parents=True)
  (folder / job.RECORD).write_text(json.dumps(record))


def test_records_of_other_settings_processors_or_text_are_refused(tmp_path):
  spec = Spec('pre', 8e-3, 0)
  for i, (changes, match) in enumerate([
      ({'config': config_lib.to_dict(config_lib.changed(table(tmp_path).config(spec), {'train': {'steps': 99}}))},
       'train.steps = 99, but this table has 12'),
      ({'cores': 77}, 'ran on 77 processors')]):
    of = table(tmp_path / str(i))
    write(of, record_of(of, spec, **changes))
    with pytest.raises(UserError, match=match):
      schemes.load(of)
  of = table(tmp_path / 'text')
  write(of, record_of(of, spec))
  write(of, record_of(of, Spec('lns', 8e-3, 0), corpus_hash='b' * 64))
  with pytest.raises(UserError, match='different hashes'):
    schemes.load(of)


@pytest.mark.parametrize('change', [*({k: None} for k in ('arm', 'rate', 'seed', 'cores', 'diverged', 'loss', 'tokens',
                                                          'params', 'corpus_hash', 'commit', 'variance')),
                                    {'loss': 'low'}, {'loss': None}])
def test_a_record_that_lacks_what_the_table_reads_is_asked_again(tmp_path, change):
  of, spec = table(tmp_path), Spec('pre', 8e-3, 0)
  write(of, record_of(of, spec))
  assert list(schemes.load(of)) == [spec]
  path = tmp_path / 'runs' / spec.name / job.RECORD
  key, value = next(iter(change.items()))
  record = {k: v for k, v in record_of(of, spec).items() if k != key}
  path.write_text(json.dumps(record | (change if value else {} if key != 'loss' else change)))
  assert not schemes.load(of)


def test_a_record_in_the_folder_of_another_run_is_refused(tmp_path):
  of, spec = table(tmp_path), Spec('pre', 8e-3, 0)
  write(of, record_of(of, spec))
  (tmp_path / 'runs' / spec.name).rename(tmp_path / 'runs' / 'lns_lr0.008_seed0')
  with pytest.raises(UserError, match='lns_lr0.008_seed0 holds the record of pre_lr0.008_seed0; remove'):
    schemes.load(of)


@pytest.mark.slow
def test_a_finished_run_without_its_log_says_what_to_remove(short, tmp_path, cache):
  spec = Spec('pre', 8e-3, 0)
  config, folder = config_lib.to_dict(table(tmp_path).config(spec)), tmp_path / 'runs' / spec.name
  job.train(config, str(folder), {})
  (folder / 'metrics.jsonl').unlink()
  with pytest.raises(UserError, match='without its metrics.jsonl; remove that folder'):
    job.train(config, str(folder), {})


def test_a_setting_that_is_newer_than_a_record_was_at_its_default(tmp_path):
  of, spec = table(tmp_path), Spec('pre', 8e-3, 0)
  record = record_of(of, spec)
  del record['config']['model']['mix_fraction'], record['config']['data']['cache_dir']
  write(of, record)
  assert list(schemes.load(of)) == [spec]
  del record['config']['optimizer']['warmup_steps']  # 2 here, 0 by default
  with pytest.raises(UserError, match='warmup_steps = 0, but this table has 2'):
    records.check(tmp_path, record, config_lib.to_dict(of.config(spec)), of.cores)


def test_a_derived_setting_that_is_newer_than_a_record_was_what_is_derived_from_its_default(tmp_path):
  of, spec = table(tmp_path), Spec('pre', 8e-3, 0)
  record = record_of(of, spec)
  for name in ('norm_groups', 'layer_ids', 'depth', 'head_dim', 'num_kv_heads'):
    del record['config']['model'][name]
  write(of, record)
  assert list(schemes.load(of)) == [spec]


@pytest.mark.parametrize('break_it, words', [
    (lambda r: r['config']['model'].update(dance=1), 'cannot be read .config has no setting model.dance'),
    (lambda r: r['config'].update(model=3), 'cannot be read .config setting model must be a group'),
    (lambda r: r.update(config=3), 'settings that it does not tell')])
def test_a_record_whose_settings_cannot_be_read_is_refused(tmp_path, break_it, words):
  of = table(tmp_path)
  record = record_of(of, Spec('pre', 8e-3, 0))
  break_it(record)
  write(of, record)
  with pytest.raises(UserError, match=f'pre_lr0.008_seed0 holds a run with .*{words}'):
    schemes.load(of)


def test_a_job_that_leaves_no_readable_record_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(crew, '_start', lambda job, *args: subprocess.Popen(['true']))
  of = table(tmp_path)
  for work in (schemes._train, schemes._time):
    with pytest.raises(UserError, match='ended well, but its record .*record.json cannot be read'):
      work(of, {}, {})


def flags(page: str) -> dict:
  """{flag: value} of the command on a page."""
  return dict(re.findall(r'--(\w+)=(\S+)', re.search('Command: `python experiments/reproduce.py (.*)`', page)[1]))


def test_the_printed_command_is_accepted_by_the_folder_that_it_made(short, tmp_path, monkeypatch):
  jobs, data = min(2, len(os.sched_getaffinity(0))), {'source': 'a text.txt', 'data_dir': 'c4'}
  of = table(tmp_path, base=schemes.base('tiny', data), places=crew.processors(jobs))
  for spec in plan.wanted(['pre', 'lns', 'post'], of.common, {}):
    write(of, record_of(of, spec, hardware={}, versions={}))
  monkeypatch.setattr(crew, '_start', lambda *_: pytest.fail('a run was started'))
  schemes.reproduce('tiny', tmp_path, names=['lns'], jobs=jobs, only='train', data=data)
  page = (tmp_path / 'schemes.md').read_text()
  assert "'--data_source=a text.txt'" in page
  said = flags(page.replace("'--data_source=a text.txt'", '--data_source=a_text.txt'))
  assert said == {'item': 'schemes', 'scale': 'tiny', 'schemes': 'lns,post', 'data_dir': 'c4', 'workdir': 'DIR',
                  'data_source': 'a_text.txt'} | ({'jobs': str(jobs)} if jobs > 1 else {})
  again = schemes.reproduce(said['scale'], tmp_path, names=said['schemes'].split(','), only='train',
                            jobs=int(said.get('jobs', 1)), data={'source': 'a text.txt', 'data_dir': said['data_dir']})
  assert again['runs'] == 9


@pytest.mark.parametrize('chosen, known, words', [
    (plan.arms(), [], ''), (['pre'], ['pre'], '--schemes=pre '), (['pre', 'mix'], ['lns'], '--schemes=lns,mix ')])
def test_the_command_names_schemes_only_where_the_table_has_not_all(tmp_path, chosen, known, words):
  assert table(tmp_path, chosen=list(chosen)).command(known) == (
      f'python experiments/reproduce.py --item=schemes --scale=tiny {words}--workdir=DIR')


HERE = {'hardware': {'cpu': 'a'}, 'versions': {'jax': '1'}, 'commit': 'c'}


def timing_of(of: schemes.Table, arm: str, **changes) -> dict:
  timing = {'arm': arm, 'config': config_lib.to_dict(of.config(Spec(arm, of.common, 0))), 'cores': crew.size([]),
            'ratio': 1.0, 'low': 1.0, 'high': 1.0, 'steps': 27, 'tokens_per_second': [1.0, 1.0],
            'corpus_hash': 'a' * 64} | HERE | changes
  folder = of.workdir / 'speed' / arm
  folder.mkdir(parents=True)
  (folder / job.RECORD).write_text(json.dumps(timing))
  return timing


def test_speed_of_another_scale_machine_code_or_text_is_measured_again_and_never_shown(tmp_path, monkeypatch, capsys):
  of = table(tmp_path)
  monkeypatch.setattr(schemes, 'about', lambda _: HERE)
  timing_of(of, 'pre')
  cases = {'lns': ({'config': config_lib.to_dict(schemes.base('cpu', {}))}, r'with model\.'),
           'post': ({'hardware': {'cpu': 'b'}}, 'on another machine'), 'peri': ({'cores': 77}, 'on another machine'),
           'mix': ({'commit': 'older'}, 'by other code .commit older.'),
           'keel': ({'versions': {'jax': '2'}}, 'with other versions of libraries'),
           'gpas': ({'corpus_hash': 'b' * 64}, 'on another corpus'),
           'admin': ({'config': None}, 'with settings that it does not tell')}
  for arm, (changes, _) in cases.items():
    timing_of(of, arm, **changes)
  found = {Spec(arm, of.common, 0): record_of(of, Spec(arm, of.common, 0)) for arm in ('pre', *cases)}
  speeds = schemes.load_speeds(of, found, again=['pre', *list(cases)[1:]])
  assert list(speeds) == ['pre']
  said = capsys.readouterr().err
  assert re.search(r'speed of lns: measured with model\.\w+ = .*, and now left out of the table\.', said)
  assert re.search('speed of post, peri: measured on another machine, and now measured again', said)
  assert all(re.search(words, said) for _, words in cases.values())
  rows = schemes.write(of, found, speeds)['rows']
  assert [r['arm'] for r in rows if r['speed']] == ['pre'] and len(rows) == 8


@pytest.mark.slow
def test_speed_is_recorded_with_what_it_is_checked_by(short, tmp_path, cache, monkeypatch):
  from lns_jax.reproduce import speed
  monkeypatch.setattr(speed, 'ROUNDS', 1)
  of = table(tmp_path, base=schemes.base('tiny', {}))
  pre, admin = (config_lib.to_dict(of.config(Spec(a, of.common, 0))) for a in ('pre', 'admin'))
  folder = tmp_path / 'speed/admin'  # admin's first state needs a batch
  folder.mkdir(parents=True)
  made = job.speed([pre, admin], str(folder), {'arm': 'admin', 'cores': crew.size([])})
  read = records.of(folder)
  assert read == made and read['ratio'] > 0 and read['arm'] == 'admin'
  here = schemes.about(of)  # in a process of its own
  assert records.stale(read, admin, crew.size([]), here, read['corpus_hash']) is None
  assert records.stale(read, pre, crew.size([]), here, None) == "with model.scheme = 'admin', but this table has 'pre'"


@pytest.mark.parametrize('scale, low, high', [('cpu', 0.12, 0.24), ('tpu', 0.12, 0.24)])
def test_the_ramp_of_prores_is_as_long_a_share_of_the_run_as_its_own_scripts_have_it(scale, low, high):
  base = schemes.base(scale, {})
  assert low <= base.model.prores_steps * base.model.num_layers / base.train.steps <= high


def test_what_is_known_of_other_schemes_stays_in_the_table(tmp_path):
  of = table(tmp_path)
  for arm in ('pre', 'peri'):
    write(of, record_of(of, Spec(arm, 8e-3, 0), hardware={}, versions={}))
  summary = schemes.write(of, schemes.load(of), {})
  assert [r['arm'] for r in summary['rows']] == ['pre', 'peri']


def command(workdir, *arguments, **kwargs) -> subprocess.Popen:
  env = os.environ | {'XLA_FLAGS': ''}
  return subprocess.Popen(
      [sys.executable, str(ROOT / 'experiments/reproduce.py'), '--item=schemes', '--scale=tiny', '--schemes=pre',
       f'--workdir={workdir}', *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def wait_for(condition, process, timeout=300):
  deadline = time.monotonic() + timeout
  while not condition():
    assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1][-2000:]
    time.sleep(0.02)


def numbers(workdir) -> dict:
  return {r.parent.name: (json.loads(r.read_text())['loss'], json.loads(r.read_text())['variance'])
          for r in workdir.glob('runs/*/record.json')}


@pytest.mark.slow
def test_killed_preempted_and_resumed_tables_are_as_one_that_never_stopped(cache, tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  out, err = command(whole).communicate(timeout=1200)
  assert json.loads(out.splitlines()[-1])['runs'] == len(numbers(whole)), err[-2000:]
  speed = json.loads((whole / 'schemes.json').read_text())['rows'][0]['speed']
  assert speed['low'] <= speed['ratio'] <= speed['high'] and min(speed['tokens_per_second']) > 0

  process = command(broken, '--only=train')
  wait_for(lambda: (broken / 'runs/pre_lr0.008_seed0/run_info.json').exists(), process)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  process = command(broken, '--only=train')  # at once: the orphan has gone with its parent
  wait_for(lambda: len(list(broken.glob('runs/*/record.json'))) >= 3
           and any(not (f / 'record.json').exists() and (f / 'metrics.jsonl').exists() for f in run_folders(broken)),
           process)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=120)
  assert process.returncode == 75 and err.strip().splitlines()[-1].startswith('preempted: finished runs are recorded')
  out, err = command(broken, '--only=train').communicate(timeout=1200)
  assert json.loads(out.splitlines()[-1])['runs'] == len(numbers(whole)), err[-2000:]
  assert numbers(broken) == numbers(whole)
