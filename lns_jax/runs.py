"""What can be asked of finished run folders: evaluate one, compare several."""

import pathlib

import jax
import numpy as np

from lns_jax import files, paired, remote, sharding
from lns_jax.config import MeshConfig, ModelConfig, RunConfig
from lns_jax.data import dataset as dataset_lib
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.errors import UserError
from lns_jax.interop import quantise
from lns_jax.interop.load import load_run_config, load_shared
from lns_jax.train import evaluate as evaluate_lib
from lns_jax.train import log, resume, run_info

KEYS = ('loss', 'perplexity', 'bits_per_byte', 'tokens', 'accuracy', 'images')  # those that a result has


def evaluate(workdir, *, split: str = 'validation', step: int | None = None, max_tokens: int | None = None,
             parity: bool = False, int8: bool = False) -> dict:
  """Loss of a run's model on a split, on whatever devices there are.

  Args:
    step: checkpoint; the newest sound one by default.
    max_tokens: bound on the tokens; the run's own eval.max_tokens by default, 0: the whole split.
    parity: adds 'paper_loss' and 'paper_perplexity', the authors' n / (n + 1) value (paper.md 6.4).
    int8: the model with matrices of 8 bits, and what `int8_loss` adds.

  Returns:
    {'loss' nats per token, 'perplexity', 'bits_per_byte', 'tokens', 'step' (of the checkpoint)}; of a model of images
    'accuracy' and 'images' take the place of the middle three.
  """
  workdir = remote.local(workdir)
  trained_step, config = load_run_config(workdir, step)
  if config.model.family == 'encoder':
    raise UserError(f'{workdir} is an encoder, which has no split of its own; diagnose.py measures it on any text, and '
                    'evaluate_tasks.py --squad its answers.')
  if max_tokens is not None and config.model.family != 'decoder':
    raise UserError(f'{workdir} is a model of images, which --max_tokens does not bound; a split is evaluated whole.')
  if parity and config.model.family != 'decoder':
    raise UserError(f"{workdir} is a model of images; --parity is the value of the authors' language models.")
  dataset = open_dataset(workdir, config)
  mesh = sharding.fitting(config)
  model, params = load_shared(workdir, mesh, step=step)
  max_tokens = config.eval.max_tokens if max_tokens is None else max_tokens
  how = {'split': split, 'max_tokens': max_tokens, 'mesh': mesh}
  if int8:
    found, more = int8_loss(config, model, params, dataset, **how)
  else:
    found, more = score(config, model, params, dataset, **how), {}
  result = {k: found[k] for k in KEYS if k in found} | {'step': trained_step} | more
  if parity:
    result |= {'paper_loss': found['paper_loss'], 'paper_perplexity': evaluate_lib.perplexity(found['paper_loss'])}
  return result


def open_dataset(workdir, config: RunConfig):
  """The rows that the run in `workdir` was trained on. Raises UserError when they are not the same any more."""
  wanted = run_info.read(workdir)['corpus_hash']
  if wanted is None:
    raise UserError(f'{workdir} came without a tokenizer or images, so that there is nothing to evaluate it on.')
  dataset = dataset_lib.open(config)
  if dataset.hash != wanted:
    raise UserError(f'{workdir} was trained on a corpus with hash {wanted[:12]}, the present one has '
                    f'{dataset.hash[:12]}; its validation split is not the same.')
  return dataset


def score(config: RunConfig, model: ModelConfig, params, dataset, *, split: str = 'validation',
          max_tokens: int, each=None, mesh=None) -> dict[str, float]:
  """`train.evaluate.evaluate` of a model in the layout of its loop, in batches as `config` has them, on all devices.

  mesh: that on which the parameters lie already; None: they are put, whole, on every device.
  each: called with the sums over each row of every batch, {'loss' [B], 'weight' [B], ...}.
  """
  if mesh is None:
    mesh = sharding.make_mesh(MeshConfig())
    params = jax.device_put(params, sharding.replicated(mesh))
  where = jax.tree.map(lambda x: x.sharding, params)
  rows = evaluate_lib.batch_size(mesh, config.eval.batch_size or config.train.batch_size)
  step = evaluate_lib.make_eval_step(model, mesh, where, by_row=each is not None)
  return evaluate_lib.evaluate(
      step, params, dataset, mesh, split=split, rows=rows, max_tokens=max_tokens,
      progress=log.batches, **({'each': each} if each else {}))


def difference(rows: list[dict], base: list[dict]) -> Estimate:
  """Loss minus that of another model on the same rows, with the interval of paired rows; both as `score` hands out."""
  mean = Mean()
  for ours, theirs in zip(rows, base, strict=True):
    mean.add(ours['loss'].astype(np.float64) - theirs['loss'], ours['weight'])
  return mean.estimate()


def int8_loss(config: RunConfig, model: ModelConfig, params, dataset, **how) -> tuple[dict, dict]:
  """A model with matrices of 8 bits beside itself as it is, on the same rows.

  Args:
    how: as of `score`.

  Returns:
    `score` of the int8 model; and {'quantise': 'int8', 'unquantised_loss', 'difference' (int8 minus unquantised, nats),
    'difference_interval' (95 %, over rows; None for a single row), 'parameter_bytes', 'unquantised_parameter_bytes'}.
  """
  with sharding.use(how['mesh']):
    small = quantise.int8(params)
  rows, base = [], []
  found = score(config, model, small, dataset, each=rows.append, **how)
  whole = score(config, model, params, dataset, each=base.append, **how)
  rise = difference(rows, base)
  return found, {
      'quantise': 'int8', 'unquantised_loss': whole['loss'], 'difference': float(rise.value),
      'difference_interval': None if np.isnan(rise.low) else [float(rise.low), float(rise.high)],
      'parameter_bytes': quantise.nbytes(small), 'unquantised_parameter_bytes': quantise.nbytes(params)}


def compare(workdirs, *, allow_different_corpora: bool = False) -> dict:
  """Results of finished runs side by side, and their differences from the first, paired by seeds.

  Returns:
    {'runs': [{'workdir', 'settings' (those in which the runs differ), 'loss', 'perplexity', 'bits_per_byte',
    'difference' (loss minus that of the run of the first one's settings
    with the same seeds; None for those, and where there is none)}], 'groups': [{'settings',
    'pairs', 'mean_difference', 'interval' (95 %, Student's t; None for a single pair)}]}.

  Raises:
    UserError: a folder is no finished run, or the corpora differ.
  """
  runs = [_finished(remote.local(w)) for w in workdirs]
  hashes = {r['corpus_hash'] for r in runs}
  if len(hashes) > 1 and not allow_different_corpora:
    other = next(r for r in runs if r['corpus_hash'] != runs[0]['corpus_hash'])
    raise UserError(f"{runs[0]['workdir']} and {other['workdir']} were trained on different corpora "
                    f"({runs[0]['corpus_hash'][:12]}, {other['corpus_hash'][:12]}); their losses do not compare. "
                    'Give --allow_different_corpora to print them all the same.')
  other = next((r for r in runs if ('images' in r) != ('images' in runs[0])), None)
  if other:
    raise UserError(f"of {runs[0]['workdir']} and {other['workdir']} one is a model of text and one of images; their "
                    'losses do not compare.')
  size = lambda r: r.get('tokens') or r['images']
  if len({size(r) for r in runs}) > 1 and not allow_different_corpora:
    other = next(r for r in runs if size(r) != size(runs[0]))
    raise UserError(f"{runs[0]['workdir']} was evaluated on {size(runs[0]):,} tokens and {other['workdir']} on "
                    f"{size(other):,}; run both again with the same --config.eval.max_tokens.")
  differing = _differing([r.pop('config') for r in runs], runs)
  seeds = lambda r: (r['settings'].get('train.seed'), r['settings'].get('data.seed'))
  kind = lambda r: tuple((k, str(r['settings'].get(k))) for k in differing if k not in ('train.seed', 'data.seed'))
  base = {seeds(r): r['loss'] for r in runs if kind(r) == kind(runs[0])}
  for r in runs:
    has_pair = kind(r) != kind(runs[0]) and seeds(r) in base
    r['difference'] = r['loss'] - base[seeds(r)] if has_pair else None
  groups = {}
  for r in runs:
    if r['difference'] is not None:
      groups.setdefault(kind(r), []).append(r['difference'])
  return {'runs': runs, 'groups': [{'settings': dict(k), **paired.interval(d)} for k, d in groups.items()]}


def _finished(workdir) -> dict:
  info, path = run_info.read(workdir), pathlib.Path(workdir).expanduser() / 'result.json'
  if not path.is_file():
    raise UserError(f'{workdir} is not finished: it has no result.json; run its pretrain command again.')
  result = files.read_json(path, f'run the training command of {workdir} again')
  if 'loss' not in result or not {'tokens', 'images'} & set(result):
    raise UserError(f'{path} has no loss; run the training command of {workdir} again.')
  return {'workdir': str(workdir), 'corpus_hash': info['corpus_hash'], 'config': resume.with_defaults(info['config']),
          **{k: result[k] for k in KEYS if k in result}}


def _differing(configs: list[dict], runs: list[dict]) -> list[str]:
  """Names of the settings in which the runs differ; fills in each run's 'settings'."""
  flat = [resume.flat(c) for c in configs]
  names = sorted({n for f in flat for n in f if any(g.get(n) != f[n] for g in flat) and not resume.is_free(n)})
  for r, f in zip(runs, flat):
    r['settings'] = {n: f.get(n) for n in names}
  return names


def table(compared: dict) -> str:
  """`compare`'s result as lines of text."""
  names = sorted({n for r in compared['runs'] for n in r['settings']})
  measure = 'accuracy' if 'accuracy' in compared['runs'][0] else 'perplexity'
  form = '{:.4f}'.format if measure == 'accuracy' else '{:.2f}'.format
  rows = [('run', *names, 'loss', measure, 'difference')]
  for r in compared['runs']:
    difference = '' if r['difference'] is None else f"{r['difference']:+.4f}"
    rows.append((r['workdir'], *(str(r['settings'][n]) for n in names), f"{r['loss']:.4f}",
                 form(r[measure]), difference))
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = ['  '.join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
  for g in compared['groups']:
    interval = 'one pair, no interval' if g['interval'] is None else '95 %% [%+.4f, %+.4f]' % tuple(g['interval'])
    settings = ', '.join(f'{k}={v}' for k, v in g['settings'].items())
    lines.append(f"{settings}: mean difference {g['mean_difference']:+.4f} over {g['pairs']} pairs, {interval}")
  return '\n'.join(lines)
