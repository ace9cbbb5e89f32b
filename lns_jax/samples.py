"""What a model is measured on: rows of its own validation split or of any text, questions of a task, as batches."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator

import numpy as np

from lns_jax import config as config_lib
from lns_jax import runs, sharding
from lns_jax.config import DataConfig, ModelConfig
from lns_jax.data import choices, mmlu_dev, sources
from lns_jax.data import sample as sample_lib
from lns_jax.depth import tasks
from lns_jax.depth.interventions import ScoreFn
from lns_jax.errors import UserError
from lns_jax.interop import reading
from lns_jax.interop.load import is_run, load_run_config
from lns_jax.train.evaluate import place

SEQ_LEN = 512  # of rows of text for a model that is no run, unless it was trained with less
LENGTH = 2048  # positions of a model that does not say what it was trained with
PREDICTED = {'decoder': 'the next token', 'encoder': 'hidden tokens', 'vit': 'classes'}
BATCH_TOKENS = 4096  # positions whose states exist at a time
LEAST_ROWS = 16  # of a measure's part of the sample: an interval over fewer sequences says little
LEAST_QUESTIONS = 256  # of it too: the interval of an accuracy is then at most 6 points to either side


@dataclasses.dataclass(frozen=True)
class Sample:
  """Rows that a model is measured on.

  words: what a report calls them. hash: of the text or images behind them. group: this many rows in turn belong
  together. least: groups of the smallest part. bytes: of text that all predictions stand for; 0: not known.
  """

  rows: list[dict[str, np.ndarray]]
  words: str
  hash: str
  group: int = 1
  least: int = LEAST_ROWS
  bytes: int = 0

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


def size(rows: list[dict[str, np.ndarray]]) -> dict[str, int]:
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


def open_sample(path: str, config: ModelConfig, tokenizer, text: str, tokens: int, seq_len: int) -> Sample:
  """Rows of `text`; by default of a run's own validation split, and of the embedded text for other models.

  Raises UserError for a model that has no use for --text, and where its images or its tokenizer are not known.
  """
  reads = reading.of(path, config, tokenizer)
  if not config.reads_text:
    _check_images(path, text)
  elif tokenizer is None:
    raise UserError(f'{path} has no tokenizer, without which no text can be read; put its tokenizer.json there.')
  if reads.length and seq_len > reads.length:
    raise UserError(f'--seq_len={seq_len} is longer than the {reads.length} positions that {path} was trained with.')
  if is_run(path) and not text and not seq_len and config.family != 'encoder':
    dataset = runs.open_dataset(path, load_run_config(path)[1])
    rows = sample_lib.drawn(dataset, 'validation', tokens)
    digest, words = dataset.hash, f'{len(rows)} rows drawn from the validation split'
  else:
    rows, digest, words = _of_text(config, tokenizer, _data(path, reads, text, seq_len), tokens)
  if config.reads_text:
    words += f', {size(rows)["tokens"]:,} tokens'
  stands_for = 0
  if config.family == 'decoder':
    stands_for = sum(int(tokenizer.token_bytes[row['targets'][row['segment_ids'] > 0]].sum()) for row in rows)
  return Sample(rows, words, digest, bytes=stands_for)


def _check_images(path: str, text: str):
  if text:
    raise UserError(f'{path} is a model of images, which has no use for --text; it is measured on its own images.')
  if not is_run(path):
    raise UserError(f'{path} is a model of images and not a run, so that its images are not known; lns_jax.depth '
                    'measures it in Python, on batches of yours.')


def _data(path: str, reads: reading.Reading, text: str, seq_len: int) -> DataConfig:
  """How rows are made of a text: as the run's own; else with BOS as the tokenizer says."""
  if is_run(path):
    run = load_run_config(path)[1]
    return config_lib.changed(run, {'data': {'source': text or run.data.source,
                                             'seq_len': seq_len or run.data.seq_len}}).data
  return DataConfig(source=text or 'embedded', seq_len=seq_len or min(SEQ_LEN, reads.length or SEQ_LEN),
                    add_bos=reads.bos_id is not None)


def _of_text(config: ModelConfig, tokenizer, data: DataConfig, tokens: int) -> tuple[list, str, str]:
  """(rows, hash, words); of an encoder some of the tokens are hidden if it has a head that predicts them."""
  take = sample_lib.rows
  if config.family == 'encoder':
    take = functools.partial(sample_lib.encoder_rows, hidden=config.head == 'mlm')
  rows, digest, broken = take(data, tokenizer, tokens)
  return rows, digest, f'{len(rows)} rows of {data.source}' + (
      f', {broken} documents of which are not UTF-8' if broken else '')


def open_task(path: str, config: ModelConfig, tokenizer, task: str, sample: Sample) -> Task | None:
  """The task that was asked for, if any."""
  if not task:
    return None
  if task == 'accuracy':
    what = f'top-1 accuracy of {PREDICTED[config.family]} on {sample.words}'
    return Task(tasks.accuracy, sample, {'name': task, 'what': what, 'hash': sample.hash, 'chance': None})
  if config.family != 'decoder':
    raise UserError(f'{path} is a model of family {config.family}, which answers no questions; --task=accuracy is its '
                    'task.')
  if tokenizer is None:
    raise UserError(f'{path} has no tokenizer, which --task={task} needs; --task=accuracy needs none.')
  if task in mmlu_dev.NAMES:
    task = str(mmlu_dev.file(task, sources.cache_folder(DataConfig())))
  if not pathlib.Path(task).expanduser().is_file():
    raise UserError(f"--task={task} is neither 'accuracy' nor a file of questions, one JSON object a line, nor "
                    f'{" or ".join(mmlu_dev.NAMES)}.')
  reads = reading.of(path, config, tokenizer)
  found = choices.read(task, tokenizer, reads.length or LENGTH, bos=reads.bos_id)
  name = pathlib.Path(task).stem
  what = f'accuracy over {len(found):,} questions of {name} with {found.choices} choices at most'
  what += f', {found.cut:,} of which had their context cut' if found.cut else ''
  return Task(tasks.choice(found.choices), Sample(found.rows, what, found.hash, found.choices, LEAST_QUESTIONS),
              {'name': name, 'what': what, 'hash': found.file_hash, 'chance': found.chance, 'questions': len(found),
               'choices': found.choices, 'cut': found.cut})
