"""Every setting of a run: its default, type, meaning and bounds, in frozen dataclasses that check themselves.

`configs/*.py` and `--config.x.y=z` overrides produce an ml_collections ConfigDict; `from_dict` turns it
once into these classes. Nothing else in the package defines or reads a default.
"""

import dataclasses
import math
import re
from typing import Any

from lns_jax import settings
from lns_jax.errors import UserError
from lns_jax.model_config import (  # named here for all
    BIASES, EXECUTION, NORMS, PRECISIONS, ROPES, TEXT, ModelConfig, RopeScaling)
from lns_jax.settings import Section, from_dict, setting, to_dict  # as these


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
  """Where text comes from and how it becomes rows of T tokens."""

  NAME = 'data'
  source: str = setting(
      'embedded', 'embedded; a file or folder of text, JSONL, Parquet or token shards; tfds:NAME; a prepared folder. '
      'Of images: digits; a .npz file; a folder of the MNIST form.')
  data_dir: str = setting('', 'TFDS data_dir for tfds: sources.')
  cache_dir: str = setting('', 'Where prepared data go; empty: $LNS_JAX_CACHE, else the user cache folder.')
  text_field: str = setting(
      'text', 'Name of the field that holds the text in JSONL, Parquet and TFDS records.', family=TEXT)
  tokenizer: str = setting(
      'bpe', 'bpe (trained on the train split), byte, or a .model / tokenizer.json file, or a folder with one.',
      family=TEXT)
  add_bos: bool = setting(
      True, 'Whether a document starts with BOS where the tokenizer has one.', family=TEXT)
  packing: str = setting(
      'packed', 'packed: documents share rows behind a segment mask; paper: one document a row, cut or padded.',
      choices=('packed', 'paper'), family=TEXT)
  seq_len: int = setting(256, 'T: positions in a row.', low=2, family=TEXT)
  validation_fraction: float = setting(
      0.02, 'Share of documents held out where the source has no validation split.', above=0.0, below=1.0)
  seed: int = setting(0, 'Seed of the order of rows.', low=0, high=2**32 - 1)
  workers: int = setting(0, 'Processes that prepare data; 0: one a core.', low=0)
  read_threads: int = setting(4, 'Threads that read rows ahead of training.', low=1)


SCHEDULES = ('cosine', 'constant', 'linear', 'wsd')


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section):
  """Adam or AdamW and its schedule."""

  NAME = 'optimizer'
  name: str = setting('adam', 'adam: no decay; adamw: decoupled decay on matrices.', choices=('adam', 'adamw'))
  lr: float = setting(1e-3, 'Peak learning rate.', above=0.0)
  schedule: str = setting('cosine', 'Shape after the warm-up.', choices=SCHEDULES)
  warmup_steps: int = setting(0, 'Steps of linear warm-up from 0.', low=0)
  final_lr_ratio: float = setting(0.1, 'Learning rate at the last step over the peak.', low=0.0, high=1.0)
  decay_fraction: float = setting(0.2, 'Share of all steps that wsd spends decaying.', above=0.0, high=1.0)
  b1: float = setting(0.9, 'Adam: decay of the first moment.', low=0.0, below=1.0)
  b2: float = setting(0.999, 'Adam: decay of the second moment.', low=0.0, below=1.0)
  eps: float = setting(1e-8, 'Adam: added to the root of the second moment.', low=0.0)
  weight_decay: float = setting(0.0, 'Decoupled weight decay, adamw only.', low=0.0)
  decay: str = setting('matrices', 'What weight decay reaches; all: gains and biases too.', choices=('matrices', 'all'))
  clip_norm: float = setting(0.0, 'Global gradient norm above which gradients are scaled down; 0: off.', low=0.0)
  alpha_clip: str = setting(
      'joint', "Learned factors of a scheme: joint: clipped with the rest; apart: by their own norm; none: not clipped "
      'and left out of the norm of the rest.', choices=('joint', 'apart', 'none'))
  alpha_clip_norm: float = setting(0.0, 'Norm for alpha_clip = apart; 0: clip_norm.', low=0.0)
  alpha_lr_ratio: float = setting(1.0, 'Learning rate of learned factors over that of the rest.', low=0.0)

  def check(self):
    if self.alpha_clip == 'apart' and not (self.alpha_clip_norm or self.clip_norm):
      raise UserError('optimizer.alpha_clip = apart needs optimizer.alpha_clip_norm or optimizer.clip_norm above 0.')
    if self.alpha_clip_norm and self.alpha_clip != 'apart':
      raise UserError(f'optimizer.alpha_clip_norm = {self.alpha_clip_norm} needs optimizer.alpha_clip = apart, got '
                      f'{self.alpha_clip}.')
    if self.name == 'adam' and self.weight_decay:
      raise UserError(f'optimizer.weight_decay = {self.weight_decay} needs optimizer.name = adamw, got adam.')


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
  """Length, batch and logging of a run. Exactly one of steps, tokens, epochs says how long it is."""

  NAME = 'train'
  steps: int = setting(0, 'Optimizer updates.', low=0)
  tokens: str = setting(
      '', "Token budget such as '2.2B', '100M' or '1e9': floor(tokens / (batch_size * T)) updates.", family=TEXT)
  epochs: float = setting(0.0, 'Passes over the training rows.', low=0.0, high=1e6)
  batch_size: int = setting(32, 'Rows per update, over all devices and micro-batches.', low=1)
  accumulation: int = setting(1, 'Micro-batches per update.', low=1)
  seed: int = setting(0, 'Seed of the initial weights.', low=0, high=2**32 - 1)
  init_from: str = setting(
      '', 'Run folder whose newest weights this run starts from, with the layers that it has left; empty: fresh ones.')
  loss_chunk: int = setting(
      -1, 'Positions of a row whose logits exist at a time on a device; 0: all; -1: by platform and sizes.', low=-1,
      family=TEXT)
  log_every: int = setting(10, 'Steps between lines of metrics.jsonl.', low=1)
  layer_stats_every: int = setting(50, 'Steps between per-layer statistics; 0: off.', low=0)
  tensorboard: bool = setting(True, 'Whether to write TensorBoard events.')

  def check(self):
    if sum(map(bool, (self.steps, self.tokens, self.epochs))) != 1:
      raise UserError('exactly one of train.steps, train.tokens, train.epochs must be set, got '
                      f'steps={self.steps}, tokens={self.tokens!r}, epochs={self.epochs}.')
    if self.tokens:
      parse_tokens(self.tokens)
    if self.batch_size % self.accumulation:
      raise UserError(f'train.batch_size = {self.batch_size} is not a multiple of '
                      f'train.accumulation = {self.accumulation}{_neighbours(self.batch_size, self.accumulation)}')


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section):
  """Evaluation on the validation split."""

  NAME = 'eval'
  every: int = setting(0, 'Steps between evaluations; 0: only at the end.', low=0)
  max_tokens: int = setting(0, 'Upper bound on evaluated tokens; 0: the whole split.', low=0, family=TEXT)
  batch_size: int = setting(0, 'Rows per evaluation batch; 0: as in training.', low=0)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section):
  """Saving. The last step is always saved."""

  NAME = 'checkpoint'
  every: int = setting(1000, 'Steps between checkpoints; 0: only the last.', low=0)
  keep: int = setting(2, 'Newest checkpoints kept.', low=1)
  keep_every: int = setting(0, 'Checkpoints at multiples of this step are kept for ever; 0: none.', low=0)
  checksums: bool = setting(True, 'Whether every file is checksummed at saving and checked at restoring.')


# Axes of every mesh, the outermost first: neighbours along the last are neighbours on the chips' own links.
AXES = ('data', 'stage', 'fsdp', 'sequence', 'tensor')


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
  """Devices by axis; -1 takes what is left."""

  NAME = 'mesh'
  data: int = setting(-1, 'Devices that hold different rows and the same parameters.', low=-1)
  fsdp: int = setting(1, 'Devices that hold different rows and share the parameters.', low=-1)
  tensor: int = setting(1, 'Devices that share heads, MLP width and vocabulary.', low=-1)
  sequence: int = setting(1, 'Devices that share the positions of a row; keys and values are gathered.', low=-1)
  stage: int = setting(1, 'Stages of a pipeline, each with its share of the layers; needs model.loop = scan.', low=-1)
  slices: int = setting(
      0, 'Slices of a pod, which `across` goes over by the slower network; 0: as many as the devices come in.', low=0)
  across: str = setting('data', 'The axis whose outer part goes over slices.', choices=('data', 'fsdp', 'stage'))

  def check(self):
    sizes = {axis: getattr(self, axis) for axis in AXES}
    for axis, n in sizes.items():
      if n == 0:
        raise UserError(f'mesh.{axis} = 0 leaves no device; 1 does not use the axis, -1 takes what the others leave.')
    rest = [axis for axis, n in sizes.items() if n == -1]
    if len(rest) > 1:
      raise UserError(f"{' and '.join(f'mesh.{axis}' for axis in rest)} are -1, but only one can take what is left; "
                      f'set --config.mesh.{rest[0]}=1.')


@dataclasses.dataclass(frozen=True)
class ProfileConfig(Section):
  """A trace of what the devices do, for TensorBoard's or xprof's trace viewer."""

  NAME = 'profile'
  steps: str = setting('', "Steps that are traced, as '10:13' for 10, 11 and 12; empty: none.")

  def check(self):
    if self.steps and not self.range:
      raise UserError(f"profile.steps = {self.steps!r} names no steps; '10:13' are steps 10, 11 and 12.")

  @property
  def range(self) -> range:
    """The steps that are traced, counted from 1."""
    match = re.fullmatch(r'([1-9][0-9]{0,11}):([1-9][0-9]{0,11})', self.steps.strip())
    return range(int(match[1]), int(match[2])) if match else range(0)


@dataclasses.dataclass(frozen=True)
class RunConfig(Section):
  """Everything that defines a run."""

  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig(steps=1000)
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  mesh: MeshConfig = MeshConfig()
  profile: ProfileConfig = ProfileConfig()

  @property
  def row_tokens(self) -> int:
    """T: positions of a row of text, or tokens of an image."""
    return self.model.num_tokens if self.model.family == 'vit' else self.data.seq_len

  def check(self):
    for section in (self.data, self.train, self.eval):
      section.refuse_foreign(self.model.family)
    if self.model.family == 'tower':
      raise UserError('model.family = tower predicts nothing by itself; a run trains decoder or vit.')
    if self.model.family == 'decoder' and not self.model.causal:
      raise UserError('model.causal = False shows every position the token that it is to predict; a run on text needs '
                      'model.causal = True.')
    if not self.train.epochs:  # epochs become steps when the rows are counted
      num_steps(self, num_rows=0)


def changed(config: RunConfig, groups: dict[str, dict[str, Any]]) -> RunConfig:
  """The config with {group: {setting: value}} put in."""
  return dataclasses.replace(
      config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in groups.items()})


def check_warmup(optimizer: OptimizerConfig, steps: int):
  """Refuses a warm-up that is longer than the run (equal is a pure warm-up)."""
  if optimizer.warmup_steps > steps:
    raise UserError(f'optimizer.warmup_steps = {optimizer.warmup_steps} is longer than the run of {steps} steps; '
                    'give --config.optimizer.warmup_steps=N.')


def _neighbours(value: int, divisor: int) -> str:
  lower, upper = value // divisor * divisor, -(-value // divisor) * divisor
  return f'; {lower} or {upper} would be.' if lower else f'; {upper} would be.'


def check_batch(what: str, batch: int, parts: int, of: str):
  """Refuses a batch that does not split over `parts`, naming the nearest sizes that do."""
  if batch % parts:
    raise UserError(f'{what} = {batch} is not a multiple of {parts} ({of}){_neighbours(batch, parts)}')


_SUFFIXES = {'': 1, 'K': 10**3, 'M': 10**6, 'B': 10**9, 'T': 10**12}


def parse_tokens(text: str) -> int:
  """'100M', '2.2B', '1e9', '4096' -> an integer."""
  match = re.fullmatch(r'([0-9_.]+(?:[eE][+]?[0-9]+)?)([KMBT]?)', text.strip())
  try:
    return round(float(match[1]) * _SUFFIXES[match[2]])
  except (TypeError, ValueError, OverflowError):
    raise UserError(f"train.tokens = {text!r} is not a number of tokens such as '100M', '2.2B' or '1e9'.") from None


def num_steps(config: RunConfig, num_rows: int) -> int:
  """Updates of the run: from steps, tokens or epochs (of `num_rows` training rows), rounded down."""
  t = config.train
  per_step = t.batch_size * config.data.seq_len
  if t.steps:
    steps = t.steps
  elif t.tokens:
    steps = parse_tokens(t.tokens) // per_step
    if not steps:
      raise UserError(f'train.tokens = {t.tokens} is less than one batch of {t.batch_size} x '
                      f'{config.data.seq_len} = {per_step} tokens.')
  else:
    steps = math.floor(t.epochs * num_rows + 1e-9) // t.batch_size
    if not steps:
      raise UserError(f'{t.epochs} epochs of {num_rows} rows are less than one batch of {t.batch_size}.')
  check_warmup(config.optimizer, steps)
  if config.profile.steps and config.profile.range.start > steps:
    raise UserError(f'profile.steps = {config.profile.steps!r} begins behind the last step of the run, {steps}.')
  return steps


def defaults() -> dict[str, Any]:
  """Declared defaults of every setting, before derived values are filled in: the base of `configs/*.py`."""
  return settings.declared(RunConfig)
