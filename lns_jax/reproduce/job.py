"""One piece of a table's work, in a process of its own: it reads what to do from stdin and leaves a record.

The first line of stdin is JSON: {'kind': one of KINDS, 'cores': processors to stay on (empty: all), and what the
kind takes}. The end of stdin says that whoever asked is gone, and ends this process.
"""

import json
import os
import pathlib
import threading

from lns_jax import cli, files
from lns_jax import config as config_lib
from lns_jax.errors import Diverged, UserError

RECORD = 'record.json'
ABOUT = ('corpus_hash', 'commit', 'versions', 'hardware', 'time')  # what a record has from run_info.json


def train(config: dict, folder: str, said: dict) -> dict:
  """Trains, or goes on, in an ordinary run folder, and writes what the table wants to know to folder/record.json.

  Args:
    config: of the run, as `lns_jax.config.to_dict` has it. said: further keys of the record.

  'variance' [L+1] of the record is that of the last training batch, before the last update, embedding first.
  """
  from lns_jax.train import log, loop
  folder = pathlib.Path(folder)
  try:
    result = loop.train(config_lib.from_dict(config_lib.RunConfig, config), folder)
    logged = [r for r in log.read(folder / 'metrics.jsonl') if 'variance' in r]
    if not logged:
      raise UserError(f'{folder} is a finished run without its metrics.jsonl; remove that folder and run the command '
                      'again.')
    last = logged[-1]
    found = {'diverged': False, 'variance': last['variance'], **{k: result[k] for k in (
        'loss', 'perplexity', 'bits_per_byte', 'tokens', 'train_loss', 'train_tokens', 'params', 'seconds')}}
  except Diverged as e:
    found = {'diverged': True, 'loss': None, 'reason': str(e)}
  info = json.loads((folder / 'run_info.json').read_text())
  record = said | found | {k: info[k] for k in ABOUT} | {'config': config}
  files.write_json(folder / RECORD, files.finite(record))
  return record


def speed(configs: list[dict], folder: str, said: dict) -> dict:
  """Times the train steps of two configs in turn; see `lns_jax.reproduce.speed`. The record is of the second."""
  from lns_jax.reproduce import speed as speed_lib
  from lns_jax.train import run_info
  folder = pathlib.Path(folder)
  found = speed_lib.measure([config_lib.from_dict(config_lib.RunConfig, c) for c in configs], folder)
  info = run_info.collect(configs[1], found['corpus_hash'])
  record = said | found | {k: info[k] for k in (*ABOUT, 'config')}
  files.write_json(folder / RECORD, record)
  return record


def about(folder: str) -> dict:
  """Says what code and machine a job would have now. A process of its own asks, since a TPU serves one at a time."""
  from lns_jax.train import run_info
  record = run_info.collect({}, None)
  files.write_json(pathlib.Path(folder) / RECORD, record)
  return record


KINDS = {'train': train, 'speed': speed, 'about': about}


def _end_with_the_parent():
  """Ends this process when stdin does: nobody would wait for its record."""
  def watch():
    os.read(0, 1)
    os._exit(1)
  threading.Thread(target=watch, daemon=True).start()


def main():
  job = json.loads(os.fdopen(os.dup(0), buffering=1).readline())
  if cores := job.pop('cores'):
    os.sched_setaffinity(0, cores)  # before jax is imported: XLA takes a thread for each processor it may use
  _end_with_the_parent()
  KINDS[job.pop('kind')](**job)


if __name__ == '__main__':
  cli.run(main)
