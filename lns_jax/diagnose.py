"""A diagnosis: every measure of depth, of one model or of several, kept measure by measure, as numbers and a report."""

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import tqdm

from lns_jax import config as config_lib
from lns_jax import files, sharding
from lns_jax.config import MeshConfig, ModelConfig
from lns_jax.data import choices
from lns_jax.data import dataset as dataset_lib
from lns_jax.data import sample as sample_lib
from lns_jax.depth import diagnosis, finite, measures, record, scorecard, sections, tasks
from lns_jax.depth.estimate import Estimate
from lns_jax.depth.interventions import ScoreFn
from lns_jax.errors import UserError
from lns_jax.interop.load import load, load_run_config
from lns_jax.layers import param
from lns_jax.models import layout
from lns_jax.train import log, resume, run_info
from lns_jax.train.evaluate import place
from lns_jax.train.run import say

TOKENS = 262_144  # the paper's, for its angular distances
BATCH_TOKENS = 4096  # positions whose states exist at a time
MASKS = {'decoder': 'padding counts nowhere, and no document sees another', 'vit': 'every patch and the CLS token count'}
LEAST_ROWS = 16  # of a measure's part of the sample: an interval over fewer sequences says little
LEAST_QUESTIONS = 256  # of it too: the interval of an accuracy is then at most 6 points to either side


@dataclasses.dataclass(frozen=True)
class Sample:
  """Rows that a model is measured on.

  words: what a report calls them. hash: of the text or images behind them. group: this many rows in turn belong
  together. least: groups of the smallest part.
  """

  rows: list[dict[str, np.ndarray]]
  words: str
  hash: str
  group: int = 1
  least: int = LEAST_ROWS

  def part(self, share: float) -> list[dict[str, np.ndarray]]:
    """The first groups: that share of them, but not too few for an interval."""
    groups = len(self.rows) // self.group
    return self.rows[:self.group * max(round(share * groups), min(self.least, groups))]


@dataclasses.dataclass(frozen=True)
class Task:
  """A score and the rows that it is taken on. about: what depth.json says of it."""

  score_fn: ScoreFn
  sample: Sample
  about: dict


def _size(rows: list[dict[str, np.ndarray]]) -> dict[str, int]:
  """Rows, and of text the tokens in them that are not padding."""
  return {'rows': len(rows)} | ({'tokens': sum(map(sample_lib.size, rows))} if 'segment_ids' in rows[0] else {})


class Batches:
  """Rows as batches on a mesh, as often as they are asked for; rows of padding fill the last one. `tick`: after each.

  group: this many rows in turn are in one batch, and on one device.
  """

  def __init__(self, rows: list[dict], mesh, group: int = 1):
    parts = sharding.batch_parts(mesh)
    positions = group * max(np.size(v) for v in rows[0].values())
    groups = min(max(1, BATCH_TOKENS // positions), len(rows) // group)
    self._rows, self._size, self._mesh, self.tick = rows, -(-groups // parts) * parts * group, mesh, lambda: None

  def __len__(self) -> int:
    return -(-len(self._rows) // self._size)

  def __iter__(self) -> Iterator[dict]:
    for start in range(0, len(self._rows), self._size):
      rows = self._rows[start:start + self._size]
      rows = rows + [{k: np.zeros_like(v) for k, v in rows[0].items()}] * (self._size - len(rows))
      yield place(self._mesh, {k: np.stack([row[k] for row in rows]) for k in rows[0]})
      self.tick()


def diagnose(models: Sequence[str], out, *, text: str = '', tokens: int = TOKENS, seq_len: int = 0,
             chosen: Sequence[str] = (), task: str = '', dtype: str = '', seed: int = 0, angles: str = 'raw') -> dict:
  """Measures models and writes out/depth.json, out/NAME/*.npz, out/plots/ and out/report.html.

  A second call goes on: a measure that is there, of the same model, sample and settings, is not taken again.

  Args:
    models: what `lns_jax.load` opens.
    out: folder.
    text: a source as of `data.source`; a run's own validation split by default.
    tokens: size of the sample, in predictions; of a model of images, in images.
    seq_len: T of the rows that are made of `text`; the model's own by default.
    chosen: names of `depth.measures.MEASURES`; by default, and for 'all' among them, every one that is not asked_only.
    task: 'accuracy' (next token or class, on the sample), or a file of questions as `data.choices` reads it; the
      measures of layers removed are then taken with its score too.
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
  _check_out(pathlib.Path(out).expanduser().absolute())
  opened = {name: _open(path, dtype) for name, path in _names(models).items()}
  tables = {name: measures.choose(chosen, config, bool(task)) for name, (_, config, *_) in opened.items()}
  samples = {name: _sample(path, config, tokenizer, text, tokens, seq_len)
             for name, (path, config, _, tokenizer) in opened.items()}
  scored = {name: _task(path, config, tokenizer, task, samples[name])
            for name, (path, config, _, tokenizer) in opened.items()}
  out = resume.open_workdir(out, '--out')
  with resume.alone(out, '--out'), _explained():
    found, arrays = {}, {}
    for name in opened:
      found[name], arrays[name] = _measure(out / name, name, opened[name], tables[name], samples[name], scored[name],
                                           seed)
    histories = {name: log.read(pathlib.Path(path) / 'metrics.jsonl') for name, (path, *_) in opened.items()}
    files.write_json(out / 'run_info.json', files.finite(run_info.collect(
        {'models': list(models), 'text': text, 'tokens': tokens, 'task': task, 'dtype': dtype, 'seed': seed,
         'angles': angles}, None)))
    whole = next(iter(found.values())) if len(found) == 1 else {'models': found}
    files.write_json(out / 'depth.json', whole)
    diagnosis.write(out, found, histories, arrays, angles)
  return {'models': {name: scorecard.of(f) for name, f in found.items()}, 'report': str(out / 'report.html'),
          'seconds': time.perf_counter() - start}


def _check_out(out: pathlib.Path):
  """Refuses a run folder, whose own files would be overwritten, and the folders of its checkpoints."""
  for folder in (out, *out.parents):
    if folder == out and (out / 'checkpoints').is_dir():
      raise UserError(f'--out={out} is a run folder, whose own files would be overwritten; {out / "depth"} would do.')
    if folder.name == 'checkpoints' and (folder.parent / 'metrics.jsonl').exists():
      raise UserError(f'--out={out} is among the checkpoints of a run; {folder.parent / "depth"} would do.')


@contextlib.contextmanager
def _explained():
  """What a disk refuses, as a sentence."""
  try:
    yield
  except OSError as e:
    raise UserError(f'{e.filename or "a result"} cannot be written: {e.strerror or e}.') from e


def _names(models: Sequence[str]) -> dict[str, str]:
  """A short name for each path: its last parts, as many as tell them apart."""
  if not models or not all(models):
    raise UserError('--model must name run folders, separated by commas; ' + (
        'one of the names is empty.' if models else 'it is empty.'))
  paths = [pathlib.Path(m).expanduser().absolute() for m in models]
  if len(set(paths)) < len(paths):
    raise UserError(f'{next(m for m, p in zip(models, paths) if paths.count(p) > 1)} is given twice.')
  for depth in range(1, max(len(p.parts) for p in paths)):
    names = ['_'.join(p.parts[-depth:]) for p in paths]
    if len(set(names)) == len(names):
      return dict(zip(names, models))
  return {f'{i}_{p.name}': m for i, (p, m) in enumerate(zip(paths, models))}


def _open(path: str, dtype: str):
  """(path, config, stacked parameters, tokenizer); refuses weights that are not finite."""
  if dtype:
    param.dtypes(ModelConfig(precision=dtype))  # what this machine cannot do is known before anything is cast
  config, params, tokenizer = load(path, dtype=dtype or None)
  finite.check_weights(params, path)
  # One compiled body serves all layers, which is what a change of depth needs.
  config = dataclasses.replace(config, loop='scan', precision=dtype or config.precision)
  params = layout.stack(params, config)
  return path, config, params, tokenizer


def _sample(path: str, config: ModelConfig, tokenizer, text: str, tokens: int, seq_len: int) -> Sample:
  """Rows of `text`, or of the run's own validation split."""
  _, run = load_run_config(path)
  if text and tokenizer is None:
    raise UserError(f'{path} is a model of images, which has no use for --text; it is measured on its own images.')
  if seq_len > run.data.seq_len:
    raise UserError(f'--seq_len={seq_len} is longer than the {run.data.seq_len} positions that {path} was trained with.')
  if text or seq_len:
    data = config_lib.changed(run, {'data': {'source': text or run.data.source,
                                             'seq_len': seq_len or run.data.seq_len}}).data
    rows, digest, broken = sample_lib.rows(data, tokenizer, tokens)
    words = f'{len(rows)} rows of {data.source}' + (f', {broken} documents of which are not UTF-8' if broken else '')
  else:
    dataset = dataset_lib.open(run)
    rows = sample_lib.drawn(dataset, 'validation', tokens)
    digest, words = dataset.hash, f'{len(rows)} rows drawn from the validation split'
  if tokenizer is not None:
    words += f', {_size(rows)["tokens"]:,} tokens'
  return Sample(rows, words, digest)


def _task(path: str, config: ModelConfig, tokenizer, task: str, sample: Sample) -> Task | None:
  """The task that was asked for, if any."""
  if not task:
    return None
  if task == 'accuracy':
    what = f'top-1 accuracy of {"classes" if config.family == "vit" else "the next token"} on {sample.words}'
    return Task(tasks.accuracy, sample, {'name': task, 'what': what, 'hash': sample.hash, 'chance': None})
  if config.family != 'decoder':
    raise UserError(f'{path} is a model of images, which answers no questions; --task=accuracy is its task.')
  if tokenizer is None:
    raise UserError(f'{path} has no tokenizer, which --task={task} needs; --task=accuracy needs none.')
  if not pathlib.Path(task).expanduser().is_file():
    raise UserError(f"--task={task} is neither 'accuracy' nor a file of questions, one JSON object a line.")
  _, run = load_run_config(path)
  found = choices.read(task, tokenizer, run.data.seq_len, bos=tokenizer.bos_id if run.data.add_bos else None)
  name = pathlib.Path(task).stem
  what = f'accuracy over {len(found):,} questions of {name} with {found.choices} choices at most'
  what += f', {found.cut:,} of which had their context cut' if found.cut else ''
  return Task(tasks.choice(found.choices), Sample(found.rows, what, found.hash, found.choices, LEAST_QUESTIONS),
              {'name': name, 'what': what, 'hash': found.file_hash, 'chance': found.chance, 'questions': len(found),
               'choices': found.choices, 'cut': found.cut})


def _measure(folder: pathlib.Path, name: str, model, table: dict[str, measures.Measure], sample: Sample,
             task: Task | None, seed: int) -> tuple[dict, dict]:
  """(depth.json of one model, arrays by name); each measure is kept as soon as it is done."""
  path, config, params, _ = model
  folder.mkdir(exist_ok=True)
  mesh = sharding.make_mesh(MeshConfig())
  everything, taken = {}, {}
  on = {kind: task.sample if m.task else sample for kind, m in table.items()}
  costs = {kind: m.passes(config) * len(on[kind].part(m.share)) for kind, m in table.items()}
  weights, compute = param.dtypes(config)
  mask = MASKS[config.family]
  say(f'{name}: {len(table)} measures on {sample.words}, in {compute} with {weights} weights; {mask}'
      + (f'; {task.about["what"]}' if task else ''))
  with tqdm.tqdm(total=math.ceil(sum(costs.values())), unit='row', desc=name, mininterval=0.5, dynamic_ncols=True,
                 disable=jax.process_index() != 0) as bar, sharding.use(mesh):
    params = jax.device_put(params, sharding.replicated(mesh))
    about_model = _about(config, params, seed)
    for kind, measure in table.items():
      bar.set_postfix_str(kind)
      rows = on[kind].part(measure.share)
      about = about_model | {'rows': _digest(rows), 'measure': kind}
      kept = record.load(folder / f'{kind}.npz')
      if kept is None or {k: v for k, v in kept[1].items() if k != 'seconds'} != about:
        start = time.perf_counter()
        batches = Batches(rows, mesh, on[kind].group)
        batches.tick = lambda step=costs[kind] / measure.reads(config) / len(batches): bar.update(step)
        score = {'score_fn': task.score_fn} if measure.task else {}
        kept = measure.run(config, params, batches, seed=seed, **score), about
        kept[1]['seconds'] = time.perf_counter() - start
        record.save(folder / f'{kind}.npz', *kept)
      else:
        bar.update(costs[kind])
      everything |= kept[0]
      taken[kind] = _size(rows) | {'seconds': kept[1]['seconds']}
  in_files = {key for measure in table.values() for key in measure.arrays}
  result = record.make(name, config, {k: v for k, v in everything.items() if k not in in_files}) | {
      'path': str(path), 'scheme': config.scheme, 'dtype': str(compute), 'weights_dtype': str(weights),
      'sample': sample.words, 'mask': mask, 'measures': taken,
      'task': task.about if task else None}
  result['tokens'] = result['tokens'] or max(t.get('tokens', t['rows']) for t in taken.values())
  result = files.finite(result)
  files.write_json(folder / 'depth.json', result)
  return result, {name: np.asarray(e.value if isinstance(e, Estimate) else e) for name, e in everything.items()
                  if isinstance(e, (Estimate, np.ndarray))}


def _about(config: ModelConfig, params, seed: int) -> dict:
  """What decides the numbers of every measure, beside the measure itself and its rows."""
  settings = json.dumps(config_lib.to_dict(config), sort_keys=True, default=str)
  return {'weights': _digest(jax.device_get(params)), 'config': hashlib.sha256(settings.encode()).hexdigest(),
          'seed': seed}


def _digest(tree) -> str:
  """sha256 (hex) of a tree's arrays and their shapes."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    digest.update(f'{leaf.dtype}{leaf.shape}'.encode())
    digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
  return digest.hexdigest()
