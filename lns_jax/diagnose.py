"""A diagnosis: every measure of depth, of one model or of several, kept measure by measure, as numbers and a report."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np
import tqdm

from lns_jax import config as config_lib
from lns_jax import files, remote, samples, sharding
from lns_jax.config import ModelConfig
from lns_jax.depth import diagnosis, finite, measures, record, scorecard, sections
from lns_jax.depth.estimate import Estimate
from lns_jax.distributed import say
from lns_jax.errors import UserError
from lns_jax.interop.load import is_run, load_in
from lns_jax.layers import param
from lns_jax.train import log, resume, run_info

TOKENS = 262_144  # the paper's, for its angular distances
MASKS = {'decoder': 'padding counts nowhere, and no document sees another',
         'encoder': 'padding counts nowhere, and no document sees another',
         'vit': 'every patch and the CLS token count'}
# What is written beside the folders of the models.
OWN = ('depth.json', 'plots', 'report.html', 'run_info.json', 'scorecard.md', '.lock')


def diagnose(models: Sequence[str], out, *, text: str = '', tokens: int = TOKENS, seq_len: int = 0,
             chosen: Sequence[str] = (), task: str = '', dtype: str = '', seed: int = 0, angles: str = 'raw') -> dict:
  """Measures models and writes out/depth.json, out/NAME/*.npz, out/plots/ and out/report.html.

  A second call goes on: a measure that is there, of the same model, sample and settings, is not taken again.

  Args:
    models: what `lns_jax.load` opens.
    out: folder.
    text: a source as of `data.source`; by default a run's own validation split, the embedded text for other models.
    tokens: size of the sample, in predictions; of a model of images, in images.
    seq_len: T of the rows that are made of `text`; a run's own by default, for other models 512 at most.
    chosen: names of `depth.measures.MEASURES`; by default, and for 'all' among them, every one that is not asked_only.
    task: 'accuracy' (next token or class, on the sample), a file of questions as `data.choices` reads it, or a name of
      `data.mmlu_dev.NAMES`; the measures of layers removed are then taken with its score too.
    dtype: of parameters and compute: float32, bfloat16 or float64; the run's own by default.
    seed: of bootstrap and noise.
    angles: how the report shows angular distances, one of `depth.sections.ANGLES`; files hold them raw.

  Returns:
    {'models': {name: scorecard}, 'report', 'seconds'}.

  Raises:
    UserError: before anything is written, for a model, text, task, measure or folder that cannot be used; later, for
      what a measure refuses, or a disk that is full.
  """
  start = time.perf_counter()
  if tokens < 1:
    raise UserError(f'--tokens={tokens} leaves nothing to measure on; it must be 1 or more.')
  if angles not in sections.ANGLES:
    raise UserError(f'angles is {angles!r}; it is one of {", ".join(sections.ANGLES)}.')
  named = _names(models)
  _check_out(files.absolute(out).resolve(), named)
  opened = {name: _open(path, dtype) for name, path in named.items()}
  tables = {name: measures.choose(chosen, config, bool(task)) for name, (_, config, *_) in opened.items()}
  histories = {name: log.read(pathlib.Path(path) / 'metrics.jsonl') if is_run(path) else []
               for name, (path, *_) in opened.items()}
  rows_of = {name: samples.open_sample(path, config, tokenizer, text, tokens, seq_len)
             for name, (path, config, _, tokenizer) in opened.items()}
  scored = {name: samples.open_task(path, config, tokenizer, task, rows_of[name])
            for name, (path, config, _, tokenizer) in opened.items()}
  out = resume.open_workdir(out, '--out')
  with resume.alone(out, '--out'), _explained():
    found, arrays = {}, {}
    for name in opened:
      found[name], arrays[name] = _measure(out / name, name, opened[name], tables[name], rows_of[name], scored[name],
                                           seed)
    files.write_json(out / 'run_info.json', files.finite(run_info.collect(
        {'models': list(models), 'text': text, 'tokens': tokens, 'task': task, 'dtype': dtype, 'seed': seed,
         'angles': angles}, None)))
    whole = next(iter(found.values())) if len(found) == 1 else {'models': found}
    files.write_json(out / 'depth.json', whole)
    drawn = functools.partial(tqdm.tqdm, desc='pictures', unit='picture', mininterval=0.5, dynamic_ncols=True,
                              disable=jax.process_index() != 0)
    diagnosis.write(out, found, histories, arrays, angles, drawn)
  return {'models': {name: scorecard.of(f) for name, f in found.items()}, 'report': str(out / 'report.html'),
          'seconds': time.perf_counter() - start}


def _check_out(out: pathlib.Path, names: Iterable[str]):
  """Refuses run folders, whose own files would be overwritten, for all results or a model's, and what is in them."""
  if is_run(out):
    raise UserError(f'--out={out} is a run folder, whose own files would be overwritten; {out / "depth"} would do.')
  for name in names:
    if is_run(out / name):
      raise UserError(f'the results of {name} would be written to {out / name}, which is a run folder; '
                      f'--out={out / "depth"} would do.')
  for folder in (out, *out.parents):
    run = folder.parent
    if folder.name in ('checkpoints', 'tokenizer') and is_run(run) and any(
        (run / file).exists() for file in ('metrics.jsonl', 'run_info.json')):
      raise UserError(f'--out={out} is inside the {folder.name} of a run; {run / "depth"} would do.')


@contextlib.contextmanager
def _explained():
  """What a disk refuses, as a sentence."""
  try:
    yield
  except OSError as e:
    raise UserError(f'{e.filename or "a result"} cannot be written: {e.strerror or e}.') from e


def _names(models: Sequence[str]) -> dict[str, str]:
  """A short name for each path: its last parts, as many as tell them apart, and from the command's own files."""
  if not models or not all(models):
    raise UserError('--model must name run folders, Hugging Face folders or .gguf files, separated by commas; ' + (
        'one of the names is empty.' if models else 'it is empty.'))
  paths = [_parts(m) for m in models]
  if len(set(paths)) < len(paths):
    raise UserError(f'{next(m for m, p in zip(models, paths) if paths.count(p) > 1)} is given twice.')
  for depth in range(1, max(map(len, paths)) + 1):
    names = ['_'.join(p[-depth:]) for p in paths]
    if len(set(names)) == len(names) and not {'', *OWN} & set(names):
      return dict(zip(names, models))
  return {'_'.join((str(i), *p[-1:])): m for i, (p, m) in enumerate(zip(paths, models))}


def _parts(model: str) -> tuple[str, ...]:
  """Names on the way to a model, none of them '..'."""
  if '://' in model:
    return tuple(part for part in model.split('/') if part not in ('', '.', '..'))
  try:
    return files.absolute(model).resolve().parts[1:]
  except (OSError, RuntimeError) as e:  # links in a circle
    raise UserError(f'{model} cannot be opened: {getattr(e, "strerror", None) or e}.') from None


def _open(path: str, dtype: str):
  """(path, config, stacked parameters, tokenizer); refuses weights that are not finite."""
  path = os.path.expanduser(remote.local(path))
  config, params, tokenizer = load_in(dtype, path, sharding=sharding.share)
  finite.check_weights(params, path)
  # One compiled body serves all layers, which is what a change of depth needs.
  params = sharding.stack(sharding.shared(config), config, params)
  return path, dataclasses.replace(config, loop='scan'), params, tokenizer


@dataclasses.dataclass
class _Taken:
  """What the measures of one model found: by name; of each its size and seconds; why others were refused."""

  found: dict = dataclasses.field(default_factory=dict)
  measures: dict[str, dict] = dataclasses.field(default_factory=dict)
  refused: dict[str, str] = dataclasses.field(default_factory=dict)

  def add(self, kind: str, rows: list, found: dict, seconds: float):
    """What a measure found on rows."""
    self.found |= found
    self.measures[kind] = samples.size(rows) | {'seconds': seconds}


def _measure(folder: pathlib.Path, name: str, model, table: dict[str, measures.Measure], sample: samples.Sample,
             task: samples.Task | None, seed: int) -> tuple[dict, dict]:
  """(depth.json of one model, arrays by name); each measure is kept as soon as it is done."""
  path, config, params, tokenizer = model
  folder.mkdir(exist_ok=True)
  weights, compute = param.dtypes(config)
  mask = MASKS[config.family]
  say(f'{name}: {len(table)} measure{"s" * (len(table) != 1)} on {sample.words}, in {compute} with {weights} '
      f'weights; {mask}'
      + (f'; {task.about["what"]}' if task else ''))
  taken = _take(folder, name, config, params, table, sample, task, seed)
  for kind, why in taken.refused.items():
    say(f'{name}: {kind} was not taken: {why}')
  if not taken.measures:
    raise UserError(next(iter(taken.refused.values())))
  in_files = {key for measure in measures.MEASURES.values() for key in measure.arrays}
  result = record.make(name, config, {k: v for k, v in taken.found.items() if k not in in_files}) | {
      'path': str(path), 'scheme': config.scheme, 'dtype': str(compute), 'weights_dtype': str(weights),
      'sample': sample.words, 'sample_hash': _digest(sample.rows), 'text_hash': sample.hash, 'mask': mask,
      'tokenizer': tokenizer and tokenizer.hash, 'measures': taken.measures, 'refused': taken.refused,
      'task': task.about if task else None}
  result['tokens'] = result['tokens'] or max(t.get('tokens', t['rows']) for t in taken.measures.values())
  if sample.bytes and 'baseline' in result:
    result['bits_per_byte'] = result['baseline'] * samples.size(sample.rows)['tokens'] / sample.bytes / math.log(2)
  result = files.finite(result)
  files.write_json(folder / 'depth.json', result)
  return result, {key: np.asarray(e.value if isinstance(e, Estimate) else e) for key, e in taken.found.items()
                  if isinstance(e, (Estimate, np.ndarray))}


def _take(folder: pathlib.Path, name: str, config: ModelConfig, params, table: dict[str, measures.Measure],
          sample: samples.Sample, task: samples.Task | None, seed: int) -> _Taken:
  """Takes the measures of a table, or reads those that are kept in the folder, with a bar for all."""
  mesh, taken = sharding.shared(config), _Taken()
  on = {kind: task.sample if m.task else sample for kind, m in table.items()}
  costs = {kind: m.passes(config) * len(on[kind].part(m.share)) for kind, m in table.items()}
  with tqdm.tqdm(total=math.ceil(sum(costs.values())), unit='row', desc=name, mininterval=0.5, dynamic_ncols=True,
                 disable=jax.process_index() != 0) as bar, sharding.use(mesh):
    about = _about(config, params, seed)
    for kind, measure in table.items():
      bar.set_postfix_str(kind)
      end, rows = bar.n + costs[kind], on[kind].part(measure.share)
      batches = samples.Batches(rows, mesh, on[kind].group)
      step = costs[kind] / measure.reads(config) / len(batches)
      batches.tick = lambda step=step, end=end: bar.update(min(step, end - bar.n))
      score = {'score_fn': task.score_fn} if measure.task else {}
      run = functools.partial(measure.run, config, params, batches, seed=seed, **score)
      try:
        taken.add(kind, rows, *_kept(folder / f'{kind}.npz', about | {'rows': _digest(rows), 'measure': kind}, run))
      except UserError as e:  # such as a sample too small for it: the others stand
        taken.refused[kind] = str(e)
        continue
      bar.update(end - bar.n)
    for kind, measure in measures.LOSS.items():  # what an earlier call has taken of the same stays in the report
      rows = sample.part(measure.share)
      kept = None if kind in table else _load(folder / f'{kind}.npz', about | {'rows': _digest(rows), 'measure': kind})
      if kept:
        taken.add(kind, rows, *kept)
  return taken


def _load(path: pathlib.Path, about: dict) -> tuple[dict, float] | None:
  """(what a measure found, the seconds it took) as kept in `path`; None where that is not about the same."""
  kept = record.load(path)
  same = kept and {k: v for k, v in kept[1].items() if k != 'seconds'} == about
  return (kept[0], kept[1]['seconds']) if same else None


def _kept(path: pathlib.Path, about: dict, run) -> tuple[dict, float]:
  """As `_load`; taken by `run`, and kept, where there is nothing to load."""
  kept = _load(path, about)
  if kept is None:
    start = time.perf_counter()
    found = run()
    kept = found, time.perf_counter() - start
    record.save(path, kept[0], about | {'seconds': kept[1]})
  return kept


def _about(config: ModelConfig, params, seed: int) -> dict:
  """What decides the numbers of every measure, beside the measure itself and its rows."""
  settings = json.dumps(config_lib.to_dict(config), sort_keys=True, default=str)
  return {'weights': _digest(jax.device_get(params)), 'config': hashlib.sha256(settings.encode()).hexdigest(),
          'seed': seed, 'version': run_info.version('lns_jax')}


def _digest(tree) -> str:
  """sha256 (hex) of a tree's arrays and their shapes."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    digest.update(f'{leaf.dtype}{leaf.shape}'.encode())
    digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
  return digest.hexdigest()
