"""Records of finished runs of a table: reading them, and whether they belong to the table that is asked for."""

import json
import pathlib
from collections.abc import Iterable

from lns_jax import config as config_lib
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


def check(folder: pathlib.Path, record: dict, config: dict, cores: int):
  """Refuses a record of other settings than the table's, or of another number of processors.

  A setting that is newer than the record was at its default.
  """
  asked, known = resume.flat(config), resume.flat(record['config'])
  declared = resume.flat(config_lib.defaults())
  for name, value in asked.items():
    had = known.get(name, _listed(declared[name]))
    if had != value and name not in PLACES:
      raise UserError(f'{folder} holds a run with {name} = {had!r}, but this table has {value!r}; '
                      'use another --workdir, or remove that folder.')
  if record['cores'] != cores:
    raise UserError(f"{folder} ran on {record['cores']} processors, but now it would be {cores}, which rounds "
                    'otherwise; use the same --jobs, or another --workdir.')


def _listed(value):
  return list(value) if isinstance(value, tuple) else value


def check_corpus(records: Iterable[dict]):
  """Refuses runs on different corpora in one table."""
  hashes = sorted({r['corpus_hash'] for r in records})
  if len(hashes) > 1:
    raise UserError(f'the runs are on corpora with different hashes ({hashes[0][:12]}, {hashes[1][:12]}), and their '
                    'losses do not compare; use another --workdir.')
