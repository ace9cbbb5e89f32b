"""Records of finished runs and timings of a table: reading them, and whether they belong to the table asked for."""

import json
import pathlib
from collections.abc import Iterable

from lns_jax import config as config_lib
from lns_jax.config import RunConfig
from lns_jax.errors import UserError
from lns_jax.reproduce import job
from lns_jax.train import resume

PLACES = ('data.cache_dir', 'data.workers', 'data.read_threads')  # change no number


def read(folder: pathlib.Path) -> dict | None:
  """The record in a folder; None where there is none, or a damaged one: the run is then asked again."""
  try:
    record = json.loads((folder / job.RECORD).read_text())
  except (OSError, ValueError):
    return None
  return record if isinstance(record, dict) else None


EVERY = {'arm', 'rate', 'seed', 'cores', 'diverged', 'loss', 'corpus_hash', 'commit'}
FINISHED = {'tokens', 'params', 'variance'}


def of_run(folder: pathlib.Path) -> dict | None:
  """The record of a run, as `read`; None also where it lacks what the table reads."""
  record = read(folder)
  if record is None or not EVERY <= set(record):
    return None
  whole = record['diverged'] is True or isinstance(record['loss'], float) and FINISHED <= set(record)
  return record if whole else None


def of(folder: pathlib.Path) -> dict:
  """The record of a job that ended well. Raises UserError where it cannot be read."""
  record = read(folder)
  if record is None:
    raise UserError(f'the job ended well, but its record {folder / job.RECORD} cannot be read; the same command makes '
                    'it again.')
  return record


def other_settings(record: dict, config: dict) -> str | None:
  """In words, the first setting in which a record differs from the config; None where there is none.

  A setting that is newer than the record was at its default, from which it is derived as it would be now.
  """
  if not isinstance(record.get('config'), dict):
    return 'with settings that it does not tell'
  try:
    known = resume.flat(config_lib.to_dict(config_lib.from_dict(RunConfig, record['config'])))
  except UserError as e:
    return f"with settings that cannot be read ({str(e).rstrip('.')})"
  return next((f'with {name} = {known[name]!r}, but this table has {value!r}'
               for name, value in resume.flat(config).items() if known[name] != value and name not in PLACES), None)


def check(folder: pathlib.Path, record: dict, config: dict, cores: int):
  """Refuses a record of other settings than the table's, or of another number of processors."""
  if other := other_settings(record, config):
    raise UserError(f'{folder} holds a run {other}; use another --workdir, or remove that folder.')
  if record['cores'] != cores:
    raise UserError(f"{folder} ran on {record['cores']} processors, but now it would be {cores}, which rounds "
                    'otherwise; use the same --jobs, or another --workdir.')


def stale(timing: dict, config: dict, cores: int, here: dict, corpus: str | None) -> str | None:
  """In words, why a timing does not belong in the table: other settings, machine, code or text; None where it does.

  Args:
    here: `job.about` of the present. corpus: hash of the runs' corpus; None without runs.
  """
  if other := other_settings(timing, config):
    return other
  if timing['hardware'] != here['hardware'] or timing['cores'] != cores:
    return 'on another machine'
  if timing['versions'] != here['versions']:
    return 'with other versions of libraries'
  if timing['commit'] != here['commit']:
    return f"by other code (commit {str(timing['commit'])[:12]})"
  return 'on another corpus' if corpus and timing['corpus_hash'] != corpus else None


def check_corpus(records: Iterable[dict]):
  """Refuses runs on different corpora in one table."""
  hashes = sorted({r['corpus_hash'] for r in records})
  if len(hashes) > 1:
    raise UserError(f'the runs are on corpora with different hashes ({hashes[0][:12]}, {hashes[1][:12]}), and their '
                    'losses do not compare; use another --workdir.')
