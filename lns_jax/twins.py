"""Twins: models that differ in their scheme alone, trained on the same rows from the same weights, and compared.

Where the seconds of the full quickstart go, of both twins together, on the README's 2 cores (132 s in all; every run
prints its own):

  phase       s  share  what
  data        4     3 %  embedded corpus, tokenizer, rows; nearly nothing the second time
  compile    20    15 %  opening the data, initial state, compiling the step
  train      74    56 %  steps and checkpoints: at most 60 % of the whole
  evaluate   25    19 %  the whole validation split, four times
  depth       8     6 %  compiling and computing variance, angles and removals on the fixed sample
  report      1     1 %  report.html
"""

import contextlib
import dataclasses
import pathlib
import time

import numpy as np

from lns_jax import config as config_lib
from lns_jax import depth, files
from lns_jax.config import RunConfig
from lns_jax.data import pipeline, prepare
from lns_jax.data import sample as sample_lib
from lns_jax.depth import record, report
from lns_jax.distributed import say
from lns_jax.errors import Diverged
from lns_jax.interop.load import load
from lns_jax.train import log, loop, resume, run_info


class Clock:
  """Seconds by phase."""

  def __init__(self):
    self.start, self.seconds = time.perf_counter(), {}

  @contextlib.contextmanager
  def phase(self, name: str):
    start = time.perf_counter()
    yield
    self.seconds[name] = time.perf_counter() - start

  def total(self) -> float:
    return time.perf_counter() - self.start

  def table(self) -> str:
    """Lines of phase, seconds and share."""
    total = self.total()
    return '\n'.join(f'  {name:13s} {s:7.1f} s {s / total:6.1%}' for name, s in self.seconds.items())


def with_scheme(config: RunConfig, scheme: str) -> RunConfig:
  """The twin of a run with another scheme."""
  return config_lib.changed(config, {'model': {'scheme': scheme}})


def compare(config: RunConfig, workdir: str | pathlib.Path, schemes: tuple[str, ...], sample_tokens: int) -> dict:
  """Trains one model a scheme in workdir/SCHEME and measures all of them on the same sample.

  Writes workdir/summary.json and workdir/report.html, and returns the summary. A second call goes on where the
  first stopped.

  Args:
    sample_tokens: size of the sample for the depth measures: rows drawn from the validation split.
  """
  workdir, clock = resume.open_workdir(workdir), Clock()
  with clock.phase('data'):
    dataset = pipeline.open(prepare.prepare(config.data, config.model.vocab_size))
  sample = _sample(dataset, config.train.batch_size, sample_tokens)
  found, histories = {}, {}
  for scheme in schemes:
    trained, seconds = _train(with_scheme(config, scheme), workdir / scheme)
    clock.seconds |= {f'{phase} {scheme}': s for phase, s in seconds.items()}
    with clock.phase(f'depth {scheme}'):
      measured = {} if trained['diverged'] else _measure(workdir / scheme, scheme, sample)
    found[scheme] = {**measured, **trained, 'sample_tokens': measured.get('tokens')}
    histories[scheme] = log.read(workdir / scheme / 'metrics.jsonl')
  with clock.phase('report'):
    summary = {'schemes': found, 'config': config_lib.to_dict(config), 'sample': sample.name,
               'corpus': corpus(dataset), 'hardware': run_info.hardware(), 'phases': clock.seconds,
               'seconds': clock.total()}
    report.write(workdir / 'report.html', summary, histories)
  summary |= {'phases': clock.seconds, 'seconds': clock.total()}
  summary = files.finite(summary)
  files.write_json(workdir / 'summary.json', summary)
  say(f'seconds by phase, {clock.total():.0f} in all:\n{clock.table()}')
  return summary


def _train(config: RunConfig, workdir: pathlib.Path) -> tuple[dict, dict]:
  """(what a summary says of the run, seconds by phase)."""
  start = time.perf_counter()
  try:
    result = loop.train(config, workdir)
  except Diverged as e:
    say(f'{workdir.name} diverged: {e}')
    return {'val_loss': None, 'val_perplexity': None, 'tokens': None, 'params': None, 'tokens_per_second': None,
            'diverged': True, 'reason': str(e)}, {'train': time.perf_counter() - start}
  return {'val_loss': result['loss'], 'val_perplexity': result['perplexity'],
          'val_bits_per_byte': result['bits_per_byte'], 'val_tokens': result['tokens'],
          'tokens': result['train_tokens'], 'params': result['params'],
          'tokens_per_second': result['tokens_per_second'], 'diverged': False}, {
              'compile': result['start_seconds'], 'train': result['step_seconds'], 'evaluate': result['eval_seconds']}


@dataclasses.dataclass(frozen=True)
class Sample:
  """The batches that all twins are measured on, and what to call them in a report."""

  batches: list[dict]
  name: str


def _sample(dataset, rows_a_batch: int, tokens: int) -> Sample:
  rows = sample_lib.drawn(dataset, 'validation', tokens)
  rows_a_batch = min(rows_a_batch, len(rows))
  rows = rows[:len(rows) - len(rows) % rows_a_batch]  # whole batches: one compiled shape
  batches = [{k: np.stack([row[k] for row in rows[i:i + rows_a_batch]]) for k in rows[0]}
             for i in range(0, len(rows), rows_a_batch)]
  counted = sum(map(sample_lib.size, rows))
  return Sample(batches, f'{len(rows)} rows drawn from the validation split, {counted:,} tokens')


def _measure(workdir: pathlib.Path, name: str, sample: Sample) -> dict:
  """depth.json of a run on the sample."""
  say(f'{name}: variance, angles and the removal of each layer on {sample.name}')
  config, params, _ = load(workdir)
  estimates = depth.profile(config, params, sample.batches) | depth.layer_drop(config, params, sample.batches)
  found = record.make(name, config, estimates)
  files.write_json(workdir / 'depth.json', found)
  return found


def corpus(dataset) -> dict:
  """What a report says of its data."""
  return {'hash': dataset.hash, 'rows': {s: dataset.num_rows(s) for s in ('train', 'validation')},
          'tokenizer_tokens': dataset.tokenizer.vocab_size, 'info': dataset.info}


def table(summary: dict) -> str:
  """The comparison as lines of text."""
  rows = [('', *summary['schemes'])]
  for label, key, form in (('validation loss', 'val_loss', '.4f'), ('perplexity', 'val_perplexity', '.2f'),
                           ('bits per byte', 'val_bits_per_byte', '.4f'), ('tokens', 'tokens', ',d'),
                           ('parameters', 'params', ',d'), ('tokens/s', 'tokens_per_second', ',.0f')):
    rows.append((label, *(_form(s.get(key), form) for s in summary['schemes'].values())))
  rows.append(('last variance', *(_form(s.get('variance', [None])[-1], '.3f') for s in summary['schemes'].values())))
  widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
  return '\n'.join('  '.join(c.ljust(widths[0]) if i == 0 else c.rjust(max(w, 10))
                             for i, (c, w) in enumerate(zip(r, widths))) for r in rows)


def _form(value, form: str) -> str:
  return '-' if value is None else format(value, form)
