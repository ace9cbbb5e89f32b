"""The table of schemes: all of them trained alike, each at its own best rate, and compared with pre in pairs.

  workdir/runs/ARM_lrRATE_seedN/   ordinary run folders, each with record.json and log.txt
  workdir/speed/ARM/               timing of the train step against pre's
  workdir/schemes.json, .md, .png  the table as far as it is known, written anew after every run
"""

import collections
import dataclasses
import math
import pathlib
import shlex
import sys
from collections.abc import Iterable

import tqdm

from lns_jax import config as config_lib
from lns_jax import files, presets
from lns_jax.config import RunConfig
from lns_jax.errors import UserError, nearest
from lns_jax.reproduce import crew, plan, records, schemes_page, schemes_plot, schemes_summary
from lns_jax.train import resume

PHASES = ('all', 'train', 'speed')
# By scale: a shipped config, and what the table changes in it. 100,000 tokens of validation are the same rows for all.
_LEAN = {'keep': 1, 'keep_every': 0}
# ProRes' own scripts ramp 12,000 of 100,000 updates (130M, 12 layers: 12 %) and 24,000 (350M, 24 layers: 24 %), T =
# 1000. Here T = 2 gives 32 of 160 (20 %), and on TPUs T = 200 gives 2,400 of 20,000 (12 %, that of its 130M).
SCALES = {
    'cpu': ('quickstart', {'model': {'prores_steps': 2}, 'eval': {'every': 0, 'max_tokens': 100_000},
                           'checkpoint': {'every': 0, **_LEAN}}),
    'tiny': ('quickstart:tiny', {'eval': {'every': 0}, 'checkpoint': {'every': 0, **_LEAN}}),
    'tpu': ('llama_130m', {'model': {'prores_steps': 200}, 'checkpoint': _LEAN}),
}


@dataclasses.dataclass(frozen=True)
class Table:
  """What is to be run, and where.

  Attributes:
    base: settings of every run but for the arm's own, the rate and the seeds. arms: settings by arm, all that exist.
    chosen: names of the arms to run; what is known of others is shown all the same. data: where the text lies, if not
    where the shipped config says.
  """

  scale: str
  base: RunConfig
  arms: dict[str, dict]
  chosen: list[str]
  workdir: pathlib.Path
  places: list[list[int]]
  data: dict = dataclasses.field(default_factory=dict)

  @property
  def common(self) -> float:
    """The rate that all arms share."""
    return self.base.optimizer.lr

  @property
  def cores(self) -> int:
    """Processors of one run."""
    return crew.size(self.places[0])

  def config(self, spec: plan.Spec) -> RunConfig:
    """Settings of one run."""
    return config_lib.changed(config_lib.changed(self.base, self.arms[spec.arm]), {
        'optimizer': {'lr': spec.rate}, 'train': {'seed': spec.seed}, 'data': {'seed': spec.seed}})

  def folder(self, spec: plan.Spec) -> pathlib.Path:
    """Run folder."""
    return self.workdir / 'runs' / spec.name

  def command(self, known: Iterable[str]) -> str:
    """The command that makes all of the table, in its folder too. known: arms of which there are runs."""
    rows = [a for a in self.arms if a in self.chosen or a in known]
    named = [] if rows == list(self.arms) else [a for a in rows if a != plan.BASELINE] or rows
    flags = {'item': 'schemes', 'scale': self.scale, 'jobs': len(self.places) if len(self.places) > 1 else None,
             'schemes': ','.join(named), 'data_dir': self.data.get('data_dir'), 'data_source': self.data.get('source')}
    given = [f'--{name}={value}' for name, value in flags.items() if value]
    return shlex.join(['python', 'experiments/reproduce.py', *given, '--workdir=DIR'])


def base(scale: str, data: dict) -> RunConfig:
  """What all runs of a scale share. `data`: settings that say where the text lies."""
  name, changes = SCALES[scale]
  config = presets.load_config(name)
  # Statistics of the first and the last step alone: the last variance is all that the table wants.
  train = {'tensorboard': False, 'layer_stats_every': config_lib.num_steps(config, 0)}
  config = config_lib.changed(config, changes)
  return config_lib.changed(config, {'model': {'loop': 'scan'}, 'train': train, 'data': data})


def choose(names: list[str] | None) -> list[str]:
  """The arms to run: all, or pre and those named, in the table's order. Raises UserError for unknown ones."""
  known = plan.arms()
  if names is not None and not any(names):
    raise UserError('--schemes names no row; leave it out for all of them.')
  for name in names or ():
    if name not in known:
      raise UserError(f'--schemes names {name!r}, which is no row of this table.{nearest(name, known)}')
  return [a for a in known if not names or a in names or a == plan.BASELINE]


def reproduce(scale: str, workdir, *, names: list[str] | None = None, jobs: int = 1, only: str = 'all',
              data: dict | None = None) -> dict:
  """Trains what is missing, times what is missing, and writes the table; goes on where an earlier call stopped.

  Args:
    scale: a key of SCALES. names: arms to run besides pre; all by default.
    jobs: runs at a time, each on its own share of the processors. On the 2 cores of the README two runs of one
      core each gained nothing: 86 s of processor time a run (64 user, 22 system) against 78 s on both cores.
    only: 'train', 'speed' (which wants the machine for itself) or 'all': one after the other.

  Returns the last line of the command: where the table is, and which arms came out better or worse than pre.
  """
  if scale == 'tpu' and jobs != 1:
    raise UserError(f'--scale=tpu runs one job at a time, which has all chips, got --jobs={jobs}.')
  data, places = data or {}, crew.processors(jobs)
  table = Table(scale, base(scale, data), plan.arms(), choose(names), resume.open_workdir(workdir), places, data)
  for arm in table.chosen:
    table.config(plan.Spec(arm, table.common, 0))  # what the settings refuse, they refuse now
  with resume.alone(table.workdir):
    found = load(table)
    speeds = load_speeds(table, found, again=() if only == 'train' else table.chosen)
    if only != 'speed':
      _train(table, found, speeds)
    if only != 'train':
      _time(table, found, speeds)
    summary = write(table, found, speeds)
  return brief(table, summary)


def load(table: Table) -> dict[plan.Spec, dict]:
  """Records of all runs that the folder holds, checked against the table."""
  found = {}
  for folder in sorted((table.workdir / 'runs').glob('*/')):
    record = records.of_run(folder)
    if record is None or record['arm'] not in table.arms:
      continue
    spec = plan.Spec(record['arm'], record['rate'], record['seed'])
    if folder.name != spec.name:
      raise UserError(f'{folder} holds the record of {spec.name}; remove that folder, or give it its name back.')
    records.check(folder, record, config_lib.to_dict(table.config(spec)), table.cores)
    found[spec] = record
  records.check_corpus(found.values())
  return found


def load_speeds(table: Table, found: dict, again: Iterable[str]) -> dict[str, dict]:
  """Timings by arm that belong in the table; says in a line which do not, and that those in `again` are made anew."""
  known = {a: r for a in table.arms if (r := records.read(table.workdir / 'speed' / a))}
  if not known:
    return {}
  here, stale = about(table), collections.defaultdict(list)
  corpus = next((r['corpus_hash'] for r in found.values()), None)
  for arm, timing in list(known.items()):
    config = config_lib.to_dict(table.config(plan.Spec(arm, table.common, 0)))
    if why := records.stale(timing, config, crew.size([]), here, corpus):
      del known[arm]
      stale[why, 'measured again' if arm in again else 'left out of the table'].append(arm)
  for (why, now), arms in stale.items():
    tqdm.tqdm.write(f"speed of {', '.join(arms)}: measured {why}, and now {now}.", file=sys.stderr)
  return known


def about(table: Table) -> dict:
  """`job.about`: the present code and machine."""
  asked = crew.Job('a look at code and machine', table.workdir / 'about', {
      'kind': 'about', 'folder': str(table.workdir / 'about')})
  answers = []
  crew.work(lambda: [] if answers else [asked], lambda job: answers.append(records.of(job.folder)), [[]],
            cache=table.workdir / 'programs')
  return answers[0]


def losses(found: dict[plan.Spec, dict]) -> dict[plan.Spec, float]:
  """What the plan goes by: infinite where a run diverged."""
  return {s: math.inf if r['diverged'] else r['loss'] for s, r in found.items()}


def _train(table: Table, found: dict, speeds: dict):
  """All wanted runs that are not found, the table written anew after each."""
  def todo():
    missing = [s for s in plan.wanted(table.chosen, table.common, losses(found)) if s not in found]
    return [crew.Job(s.name, table.folder(s), {
        'kind': 'train', 'config': config_lib.to_dict(table.config(s)), 'folder': str(table.folder(s)),
        'said': dataclasses.asdict(s) | {'cores': table.cores}}) for s in missing]
  def done(job):
    record = records.of(job.folder)
    found[plan.Spec(record['arm'], record['rate'], record['seed'])] = record
    records.check_corpus(found.values())
    write(table, found, speeds)
    bar.update()
    end = 'diverged' if record['diverged'] else f"{record['loss']:.4f}"
    tqdm.tqdm.write(f'{job.name}: {end}', file=sys.stderr)
  def tick(names):
    bar.total = max(plan.expected(table.chosen, table.common, losses(found)), bar.n)
    _show(bar, names)
  wanted = plan.wanted(table.chosen, table.common, losses(found))
  with _bar('runs', sum(s in found for s in wanted), len(wanted)) as bar:
    crew.work(todo, done, table.places, cache=table.workdir / 'programs', tick=tick)


def _time(table: Table, found: dict, speeds: dict):
  """The step of every chosen arm against pre's, one after the other on all processors; pre's own shows the noise."""
  folder = lambda arm: table.workdir / 'speed' / arm
  config = lambda arm: config_lib.to_dict(table.config(plan.Spec(arm, table.common, 0)))
  def todo():
    return [crew.Job(f'speed of {a}', folder(a), {
        'kind': 'speed', 'configs': [config(plan.BASELINE), config(a)], 'folder': str(folder(a)),
        'said': {'arm': a, 'cores': crew.size([])}}) for a in table.chosen if a not in speeds]
  def done(job):
    record = records.of(job.folder)
    speeds[record['arm']] = record
    records.check_corpus([*found.values(), *speeds.values()])
    write(table, found, speeds)
    bar.update()
  with _bar('timing', len(table.chosen) - len(todo()), len(table.chosen)) as bar:
    crew.work(todo, done, [[]], cache=table.workdir / 'programs',
              tick=lambda names: _show(bar, names))


def _bar(what: str, initial: int, total: int) -> tqdm.tqdm:
  return tqdm.tqdm(desc=what, initial=initial, total=total, unit='run', dynamic_ncols=True, smoothing=0, miniters=0,
                   mininterval=10)


def _show(bar: tqdm.tqdm, names: list[str]):
  """Names what runs: at once when it changes, and the time that is left every ten seconds."""
  text = ', '.join(names)
  if text == bar.postfix:
    bar.update(0)
  else:
    bar.set_postfix_str(text)


def write(table: Table, found: dict, speeds: dict) -> dict:
  """Writes schemes.json, schemes.md and schemes.png of what is known, and returns the first."""
  summary = files.finite(schemes_summary.summary(table.scale, table.base, table.arms, table.chosen, found, losses(found),
                                                 speeds, table.command({s.arm for s in found})))
  files.write_json(table.workdir / 'schemes.json', summary)
  files.write_text(table.workdir / 'schemes.md', schemes_page.page(summary))
  schemes_plot.save(table.workdir / 'schemes.png', summary)
  return summary


def brief(table: Table, summary: dict) -> dict:
  """The JSON line of the command."""
  verdicts = {row['arm']: row['tuned'].get('verdict') for row in summary['rows']}
  by = lambda verdict: [a for a, v in verdicts.items() if v == verdict]
  lost = [row['arm'] for row in summary['rows'] if row['tuned'].get('diverged')]  # a seed of it, or all
  return {'item': 'schemes', 'scale': table.scale, 'table': str(table.workdir / 'schemes.md'),
          'runs': len(summary['runs']), 'diverged_runs': sum(r['diverged'] for r in summary['runs']),
          **{word.replace(' ', '_'): by(word) for word in ('better', 'worse', 'no difference shown')}, 'diverged': lost}
