"""A diagnosis: every measure of depth, of one model or of several, kept measure by measure, as numbers and a report."""

import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import tqdm

from lns_jax import config as config_lib
from lns_jax import files, sharding
from lns_jax.config import MeshConfig, ModelConfig
from lns_jax.data import dataset as dataset_lib
from lns_jax.data import sample as sample_lib
from lns_jax.depth import diagnosis, measures, record, scorecard, sections
from lns_jax.depth.estimate import Estimate
from lns_jax.errors import UserError
from lns_jax.interop.load import load, load_run_config
from lns_jax.layers import param
from lns_jax.models import by_layer, layout
from lns_jax.train import log, resume, run_info
from lns_jax.train.evaluate import place
from lns_jax.train.run import say

TOKENS = 262_144  # the paper's, for its angular distances
BATCH_TOKENS = 4096  # positions whose states exist at a time
LEAST_ROWS = 16  # of a measure's part of the sample: an interval over fewer sequences says little


@dataclasses.dataclass(frozen=True)
class Sample:
  """Rows that a model is measured on. words: what a report calls them. hash: of the text or images behind them."""

  rows: list[dict[str, np.ndarray]]
  words: str
  hash: str

  def part(self, share: float) -> list[dict[str, np.ndarray]]:
    """The first rows: that share of them, but not too few for an interval."""
    return self.rows[:max(round(share * len(self.rows)), min(LEAST_ROWS, len(self.rows)))]


class Batches:
  """Rows as batches on a mesh, as often as they are asked for; rows of padding fill the last one. `tick`: after each."""

  def __init__(self, rows: list[dict], mesh):
    parts = sharding.batch_parts(mesh)
    positions = max(np.size(v) for v in rows[0].values())
    size = min(max(1, BATCH_TOKENS // positions), len(rows))
    self._rows, self._size, self._mesh, self.tick = rows, -(-size // parts) * parts, mesh, lambda: None

  def __len__(self) -> int:
    return -(-len(self._rows) // self._size)

  def __iter__(self) -> Iterator[dict]:
    for start in range(0, len(self._rows), self._size):
      rows = self._rows[start:start + self._size]
      rows = rows + [{k: np.zeros_like(v) for k, v in rows[0].items()}] * (self._size - len(rows))
      yield place(self._mesh, {k: np.stack([row[k] for row in rows]) for k in rows[0]})
      self.tick()


def diagnose(models: Sequence[str], out, *, text: str = '', tokens: int = TOKENS, seq_len: int = 0,
             chosen: Sequence[str] = (), dtype: str = '', seed: int = 0, angles: str = 'raw') -> dict:
  """Measures models and writes out/depth.json, out/NAME/*.npz, out/plots/ and out/report.html.

  A second call goes on: a measure that is there, of the same model, sample and settings, is not taken again.

  Args:
    models: what `lns_jax.load` opens.
    out: folder.
    text: a source as of `data.source`; a run's own validation split by default.
    tokens: size of the sample, in predictions; of a model of images, in images.
    seq_len: T of the rows that are made of `text`; the model's own by default.
    chosen: names of `depth.measures.MEASURES`; by default, and for 'all' among them, every one that is not asked_only.
    dtype: of parameters and compute: float32, bfloat16 or float64; the run's own by default.
    seed: of bootstrap and noise.
    angles: how the report shows angular distances, one of `depth.sections.ANGLES`; files hold them raw.

  Returns:
    {'models': {name: scorecard}, 'report', 'seconds'}.

  Raises:
    UserError: before anything is written, for a model, text or measure that cannot be used.
  """
  start = time.perf_counter()
  if angles not in sections.ANGLES:
    raise UserError(f'angles is {angles!r}; it is one of {", ".join(sections.ANGLES)}.')
  opened = {name: _open(path, dtype) for name, path in _names(models).items()}
  tables = {name: measures.choose(chosen, config) for name, (_, config, *_) in opened.items()}
  samples = {name: _sample(path, config, tokenizer, text, tokens, seq_len)
             for name, (path, config, _, tokenizer) in opened.items()}
  out = resume.open_workdir(out)
  with resume.alone(out):
    found, arrays = {}, {}
    for name in opened:
      found[name], arrays[name] = _measure(out / name, name, opened[name], tables[name], samples[name], seed)
    histories = {name: log.read(pathlib.Path(path) / 'metrics.jsonl') for name, (path, *_) in opened.items()}
    files.write_json(out / 'run_info.json', files.finite(run_info.collect(
        {'models': list(models), 'text': text, 'tokens': tokens, 'dtype': dtype, 'seed': seed, 'angles': angles},
        None)))
    whole = next(iter(found.values())) if len(found) == 1 else {'models': found}
    files.write_json(out / 'depth.json', whole)
    diagnosis.write(out, found, histories, arrays, angles)
  return {'models': {name: scorecard.of(f) for name, f in found.items()}, 'report': str(out / 'report.html'),
          'seconds': time.perf_counter() - start}


def _names(models: Sequence[str]) -> dict[str, str]:
  """A short name for each path: its last parts, as many as tell them apart."""
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
  config, params, tokenizer = load(path, dtype=dtype or None)
  # One compiled body serves all layers, which is what a change of depth needs.
  config = dataclasses.replace(config, loop='scan', precision=dtype or config.precision)
  params = layout.stack(params, config)
  for name, leaf in by_layer.leaves(params):
    if not bool(jax.numpy.all(jax.numpy.isfinite(leaf))):
      raise UserError(f'{path}: the weights {name} hold numbers that are not finite; there is nothing to measure.')
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
    rows, digest = sample_lib.rows(data, tokenizer, tokens)
    words = f'{len(rows)} rows of {data.source}'
  else:
    dataset = dataset_lib.open(run)
    rows = [dataset.row('validation', i) for i in range(min(tokens, dataset.rows_within('validation', tokens)))]
    digest, words = dataset.hash, f'the first {len(rows)} rows of the validation split'
  if tokenizer is not None:
    words += f', {sum(int((row["segment_ids"] > 0).sum()) for row in rows):,} tokens'
  return Sample(rows, words, digest)


def _measure(folder: pathlib.Path, name: str, model, table: dict[str, measures.Measure], sample: Sample,
             seed: int) -> tuple[dict, dict]:
  """(depth.json of one model, arrays by name); each measure is kept as soon as it is done."""
  path, config, params, _ = model
  folder.mkdir(exist_ok=True)
  mesh = sharding.make_mesh(MeshConfig())
  everything, taken = {}, {}
  costs = {kind: m.passes(config) * len(sample.part(m.share)) for kind, m in table.items()}
  say(f'{name}: {len(table)} measures on {sample.words}')
  with tqdm.tqdm(total=round(sum(costs.values())), unit='row', desc=name, mininterval=0.5, dynamic_ncols=True,
                 disable=jax.process_index() != 0) as bar, sharding.use(mesh):
    params = jax.device_put(params, sharding.replicated(mesh))
    about_model = _about(config, params, sample, seed)
    for kind, measure in table.items():
      bar.set_postfix_str(kind)
      rows = sample.part(measure.share)
      about = about_model | {'rows': len(rows), 'measure': kind}
      kept = record.load(folder / f'{kind}.npz')
      if kept is None or {k: v for k, v in kept[1].items() if k != 'seconds'} != about:
        start = time.perf_counter()
        batches = Batches(rows, mesh)
        batches.tick = lambda step=costs[kind] / measure.reads(config) / len(batches): bar.update(step)
        kept = measure.run(config, params, batches, seed), about
        kept[1]['seconds'] = time.perf_counter() - start
        record.save(folder / f'{kind}.npz', *kept)
      else:
        bar.update(costs[kind])
      everything |= kept[0]
      taken[kind] = {key: kept[1][key] for key in ('rows', 'seconds')}
  in_files = {key for measure in table.values() for key in measure.arrays}
  result = record.make(name, config, {k: v for k, v in everything.items() if k not in in_files}) | {
      'path': str(path), 'scheme': config.scheme, 'dtype': str(param.dtypes(config)[1]), 'sample': sample.words,
      'measures': taken}
  result = files.finite(result)
  files.write_json(folder / 'depth.json', result)
  return result, {name: np.asarray(e.value if isinstance(e, Estimate) else e) for name, e in everything.items()
                  if isinstance(e, (Estimate, np.ndarray))}


def _about(config: ModelConfig, params, sample: Sample, seed: int) -> dict:
  """What decides the numbers of every measure, beside the measure itself."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(jax.device_get(params)):
    digest.update(np.ascontiguousarray(leaf).view(np.uint8))
  settings = json.dumps(config_lib.to_dict(config), sort_keys=True, default=str)
  return {'weights': digest.hexdigest(), 'config': hashlib.sha256(settings.encode()).hexdigest(),
          'sample': sample.hash, 'seed': seed}
