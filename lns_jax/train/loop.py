"""A training run: prepare, restore, step, log, evaluate, save; stop loudly when numbers go bad."""

import contextlib
import math
import pathlib
import time

import jax
import numpy as np
from absl import logging

from lns_jax import config as config_lib
from lns_jax import advice, distributed, files, remote, sharding, shards
from lns_jax.config import RunConfig
from lns_jax.data import dataset as dataset_lib
from lns_jax.distributed import say
from lns_jax.errors import Diverged, Preempted, UserError
from lns_jax.layers import param
from lns_jax.models import transformer
from lns_jax.train import (
    checkpoint, evaluate, init_from, log, mfu, nonfinite, preemption, profile, resume, run_info)
from lns_jax.train import step as step_lib
from lns_jax.train.run import Run

LAYER_STATS = ('variance', 'attn_ratio', 'mlp_ratio', 'layer_grad_norm', 'layer_decrease', 'predicted_decrease')


def set_up(config: RunConfig, workdir: pathlib.Path) -> Run:
  """Checks everything that can be known before long work, then prepares the data."""
  resume.check_agreed(config)
  for warning in advice.warnings(config, jax.devices()[0].platform):
    say(f'warning: {warning}')
  mesh = sharding.make_mesh(config.mesh)
  sharding.check(config, mesh)
  say(f"mesh of {mesh.size}: {' x '.join(f'{axis} {n}' for axis, n in mesh.shape.items() if n > 1) or 'one device'}")
  say(sharding.attention(config, mesh))
  distributed.from_first(lambda: resume.check_config(workdir, config))
  dataset = open_dataset(config)
  init_from.check_tokenizer(config, dataset.tokenizer)
  rows, t = dataset.num_rows('train'), config.train
  steps = config_lib.num_steps(config, rows)
  dataset.train_batches(config.data.seed, t.batch_size, num_steps=0)  # refuses a set smaller than a batch
  if t.epochs:
    say(f'{t.epochs:g} epochs of {rows} rows are {steps} updates of {t.batch_size}; '
        f'{round(t.epochs * rows) - steps * t.batch_size} rows are left over.')
  return Run(config, mesh, steps, step_lib.state_shardings(mesh, config, steps), workdir, dataset)


def open_dataset(config: RunConfig):
  """The rows of a run. Process 0 prepares them first; the others find them, or prepare those of their own disk.

  Raises UserError when they are not usable, or not the same on all hosts.
  """
  if jax.process_count() == 1:
    return dataset_lib.open(config)
  first = distributed.from_first(lambda: dataset_lib.open(config).hash)
  dataset = dataset_lib.open(config)
  if dataset.hash != first:
    raise UserError(f'process {jax.process_index()} has rows with hash {dataset.hash[:12]} but process 0 has '
                    f'{first[:12]}; give all hosts the same data and the same Python, or one --config.data.cache_dir.')
  return dataset


def resolved(config: RunConfig) -> RunConfig:
  """The config with what depends on the device, or on another run, written out: a run never changes in silence."""
  config = init_from.with_its_layers(config)
  return config_lib.changed(config, {'model': {'precision': param.resolve_precision(config.model.precision)}})


def introduce(run: Run):
  """Prints the resolved settings and writes what the folder says of its run."""
  values = config_lib.to_dict(run.config)
  for group, settings in values.items():
    say(f'{group}: ' + ', '.join(f'{k}={v!r}' for k, v in settings.items()))
  state = run.abstract_state()
  if logging.level_info():  # with LNS_JAX_VERBOSE set
    logging.info('%s', shards.table(state.params))
  say(shards.summary(state.params, state.opt_state))
  if jax.process_index():
    return
  files.write_json(run.workdir / 'run_info.json', run_info.collect(values, run.dataset.hash))
  if run.dataset.tokenizer is not None:
    run.dataset.tokenizer.save(run.workdir / 'tokenizer')


def train(config: RunConfig, workdir: str | pathlib.Path) -> dict:
  """Trains until the last step, going on from what `workdir` holds.

  Returns {'loss', 'perplexity', 'bits_per_byte', 'tokens' (of the evaluation; of images: 'accuracy', 'images'), 'step',
  'train_loss', 'train_tokens', 'tokens_per_second' (of images: 'train_images', 'images_per_second'), 'params',
  'start_seconds' (data, state, compiling), 'step_seconds', 'eval_seconds' (all evaluations), 'seconds'}, which is
  result.json too.

  Raises:
    UserError: settings, data or checkpoints are not usable; the disk is full or fails; or the loss or gradient became
      non-finite, in which case the last good checkpoint is kept and the first bad layer and the batch are named.
    Preempted: after SIGTERM, once the state is saved.
  """
  start = time.perf_counter()
  with preemption.Signals() as signals:
    workdir, config = resume.open_workdir(workdir, bucket=True), resolved(config)
    with resume.held(workdir):
      run = set_up(config, workdir)
      with (files.disk_explained(workdir, 'earlier checkpoints are intact'), remote.mirrored(workdir),
            checkpoint.Checkpointer(remote.checkpoints(workdir), config.checkpoint) as saver, distributed.watched()):
        return go_on(run, saver, signals, start)


def go_on(run: Run, saver: checkpoint.Checkpointer, signals: preemption.Signals, start: float) -> dict:
  """From what the folder holds to the last step. The result of `train`; `start`: when the run began."""
  workdir = run.workdir
  done = distributed.from_first(lambda: resume.finished(run, saver))
  if done:
    say(f'{workdir} is finished: {run.steps} steps.')
    if not (workdir / 'run_info.json').exists():
      introduce(run)
    return done | dict.fromkeys(('start_seconds', 'step_seconds', 'eval_seconds', 'seconds'), 0.0)
  state, position = resume.restore_or_init(run, saver)
  introduce(run)
  say(f'{workdir}: compiling for {jax.device_count()} x {jax.devices()[0].device_kind}')
  train_step = run.compile_train_step()
  compiled = time.perf_counter()
  with contextlib.closing(log.Writer(workdir, position['step'], run.config.train.tensorboard)) as writer:
    result = Trainer(run, train_step, state, position, saver, writer, signals).fit()
  result |= {'seconds': time.perf_counter() - start, 'start_seconds': compiled - start}
  if jax.process_index() == 0:
    files.write_json(workdir / 'result.json', files.finite(result) | resume.identity(run))
  return result


class Interrupted(Exception):
  """SIGTERM came during an evaluation."""


class Trainer:
  """The loop over steps. Metrics of step k are read while step k + 1 runs, so that the device never waits."""

  def __init__(self, run: Run, train_step, state, position: dict, saver, writer: log.Writer,
               signals: preemption.Signals):
    self.run, self.train_step, self.eval_step = run, train_step, run.eval_step()
    self.state, self.saver, self.writer, self.signals = state, saver, writer, signals
    self.position = position  # {'step', 'tokens'}: Python integers, which never wrap
    self.saved = position['step']  # the newest step on disk, or a start, which needs no saving
    self.peak, source = mfu.peak_flops()
    say(f'MFU is of {self.peak / 1e12:.3g} TFLOP/s ({source})')
    self.row_flops = mfu.flops_per_token(run.config.model, run.config.row_tokens) * run.config.row_tokens
    self.unit = transformer.family(run.config.model).UNIT
    self.last, self.eval_seconds = {}, 0.0
    self.step_seconds, self.timed_to = math.nan, position['step']

  def fit(self) -> dict:
    """Runs to the last step; returns the final evaluation and totals."""
    run, began = self.run, time.perf_counter()
    start = self.position['step']
    self.signals.begin()
    try:
      with (sharding.use(run.mesh), log.bar(run.steps, start, run.workdir.name or 'train') as self.bar,
            profile.Trace(run.config.profile.range, run.workdir) as self.trace):
        if start < run.steps:
          if start and self._due(run.config.eval.every, start):
            self.evaluate()  # the writer has dropped this step's, which a kill may have come before
          self._steps(start)
        final = self.evaluate()
    except Interrupted:
      self._preempted()
    records = [r for r in log.read(run.workdir / 'metrics.jsonl') if 'loss' in r]  # of all sittings
    return {**final, 'step': run.steps, 'train_loss': records[-1]['loss'] if records else None,
            f'train_{self.unit}': self.position['tokens'], f'{self.unit}_per_second':
                float(np.median([r[f'{self.unit}_per_second'] for r in records])) if records else None,
            'params': sum(x.size for x in jax.tree.leaves(self.state.params)),
            'step_seconds': time.perf_counter() - began - self.eval_seconds, 'eval_seconds': self.eval_seconds}

  def _steps(self, start: int):
    run, pending, t = self.run, None, self.run.config.train
    batches = iter(run.dataset.train_batches(
        run.config.data.seed, t.batch_size, start_step=start, num_steps=run.steps - start,
        rows=sharding.rows(run.mesh, t.batch_size), read_threads=run.config.data.read_threads))
    if self.signals.stop():  # of several processes, JAX may have been told before `signals` was
      self._preempted()
    self.clock = time.perf_counter()
    for step in range(start + 1, run.steps + 1):
      with self.trace.step(step, self.state):
        batch = evaluate.place(run.mesh, next(batches))
        self.state, metrics = self.train_step(self.state, batch)
      self.newest = step, metrics['loss']
      if pending:
        self.read(*pending)
      pending = (step, metrics, batch)
      self.saver.check()
      stop = self.signals.stop()
      saving = stop or step == run.steps or self._due(run.config.checkpoint.every, step)
      evaluating = step < run.steps and self._due(run.config.eval.every, step)
      if saving or evaluating:
        self.read(*pending)  # a checkpoint is written only after its own step's metrics are known to be finite
        pending = None
      if saving:
        self.save(step)
      if stop and step < run.steps:
        self._preempted()
      if evaluating:
        self.evaluate()
        self.clock = time.perf_counter()

  def _preempted(self):
    """Saves the present step if it is not, and says how to go on."""
    step = self.position['step']
    self.save(step)
    self.saver.wait()
    done = f'saved step {step}' if step else 'no step was done'
    where = remote.checkpoints(self.run.workdir).parent
    raise Preempted(f'{done} of {self.run.steps} in {where}; the same command goes on from there.')

  @staticmethod
  def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0

  def _time(self, step: int):
    """Seconds of a step: the time since the last look, by the number of steps that ended in it.

    A CPU may have run the newest step while it was being started, before the metrics of `step` are read.
    """
    now, (newest, loss) = time.perf_counter(), self.newest
    ended = newest if loss.is_ready() else step
    if ended > self.timed_to:
      self.step_seconds = (now - self.clock) / (ended - self.timed_to)
      self.clock, self.timed_to = now, ended

  def read(self, step: int, metrics, batch):
    """Fetches one step's metrics, counts, logs, and stops the run when they are not finite."""
    metrics = jax.device_get(metrics)
    self._time(step)
    if not metrics.pop('finite'):
      self.saver.wait()
      nonfinite.stop(self.run, self.state.params, step, metrics, batch, self.saver.latest())
    tokens = int(metrics['tokens'])
    self.position = {'step': step, 'tokens': self.position['tokens'] + tokens}
    rows = self.run.config.train.batch_size / self.step_seconds
    rate = rows * (self.run.config.row_tokens if self.unit == 'tokens' else 1)
    share = rows * self.row_flops / self.peak
    self.last = {k: float(v) for k, v in metrics.items() if k not in (*LAYER_STATS, 'tokens')}
    self.bar.set_postfix_str(f"loss {self.last['loss']:.4f}, {rate:,.0f} {self.unit}/s, MFU {share:.1%}", refresh=False)
    self.bar.update()
    if not tokens:
      say(f'step {step}: every target of the batch is masked: no loss, and an update by momentum alone.')
    t = self.run.config.train
    record = {}
    if self._due(t.log_every, step) or step in (1, self.run.steps):
      record = {**self.last, self.unit: self.position['tokens'], f'{self.unit}_per_second': rate, 'mfu': share}
    if self._due(t.layer_stats_every, step) or (t.layer_stats_every and step in (1, self.run.steps)):
      record |= {k: metrics[k] for k in LAYER_STATS}
    if record:
      self.writer.write(step, record)

  def save(self, step: int):
    """Starts an asynchronous checkpoint of the present state in the canonical layout."""
    if self.saved == step:
      return
    params, opt_state = self.run.to_canonical((self.state.params, self.state.opt_state))
    remote.keep_up(self.run.workdir)  # before the step counts: what goes on from it finds its metrics
    self.saver.save(step, params=params, opt_state=opt_state,
                    data={**self.position, 'corpus_hash': self.run.dataset.hash},
                    config=config_lib.to_dict(self.run.config))
    self.saved = step

  def evaluate(self) -> dict:
    """Evaluates the present parameters on the validation split and logs it."""
    run, settings, start = self.run, self.run.config.eval, time.perf_counter()
    rows = evaluate.batch_size(run.mesh, settings.batch_size or run.config.train.batch_size)
    result = evaluate.evaluate(self.eval_step, self.state.params, run.dataset, run.mesh, step=self.state.step,
                               rows=rows, max_tokens=settings.max_tokens, progress=self._watched)
    self.eval_seconds += time.perf_counter() - start
    if not np.isfinite(result['loss']):
      raise Diverged(f"step {self.position['step']}: the validation loss is {result['loss']}; the parameters are "
                     'finite, but so large that the forward pass is not.')
    self.writer.write(self.position['step'], {f'val_{k}': v for k, v in result.items()})
    remote.keep_up(run.workdir)
    name = 'accuracy' if 'accuracy' in result else 'perplexity'
    say(f"step {self.position['step']}: validation loss {result['loss']:.4f}, {name} {result[name]:.4g}")
    return result

  def _watched(self, batches, _):
    """The batches of an evaluation, until SIGTERM."""
    for batch in batches:
      if self.signals.stop():
        raise Interrupted
      yield batch
