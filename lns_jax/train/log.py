"""metrics.jsonl, TensorBoard and the progress bar of a run. Only process 0 writes."""

import json
import pathlib
import time

import jax
import tqdm

from lns_jax import files
from lns_jax.errors import UserError


def read(path: pathlib.Path) -> list[dict]:
  """Lines of a metrics.jsonl; a last line that a kill cut short is left out."""
  if not path.exists():
    return []
  lines = path.read_text().splitlines()
  records = []
  for i, line in enumerate(lines):
    try:
      records.append(json.loads(line))
    except json.JSONDecodeError:
      if i + 1 < len(lines):
        raise UserError(f'{path}, line {i + 1} is damaged; remove that line and run the command again.') from None
  return records


class Writer:
  """Appends records by step, after dropping what a killed run had written past `start_step`.

  An evaluation at `start_step` itself is dropped as well: whoever goes on from there evaluates again.
  """

  def __init__(self, workdir: pathlib.Path, start_step: int, tensorboard: bool):
    self._file = self._board = None
    if jax.process_index():
      return
    path = workdir / 'metrics.jsonl'
    kept = [r for r in read(path) if r['step'] < start_step or r['step'] == start_step and 'val_loss' not in r]
    files.write_text(path, ''.join(json.dumps(r) + '\n' for r in kept))
    self._file = path.open('a', buffering=1)
    if tensorboard:
      import tensorboardX
      # TensorBoard hides purge_step itself and what is later. File names count seconds: the suffix tells starts apart.
      self._board = tensorboardX.SummaryWriter(
          str(workdir / 'tensorboard'), purge_step=start_step + 1, filename_suffix=f'.{time.time_ns()}')

  def write(self, step: int, record: dict):
    """One line {'step': step, ...}; vectors go to TensorBoard as one scalar an entry."""
    if self._file is None:
      return
    record = files.finite(record)
    self._file.write(json.dumps({'step': step, **record}) + '\n')
    if self._board is None:
      return
    for name, value in record.items():
      entries = {f'{name}/{i}': v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
      for tag, scalar in entries.items():
        if isinstance(scalar, (int, float)):
          self._board.add_scalar(tag, scalar, step)

  def close(self):
    for sink in (self._file, self._board):
      if sink is not None:
        sink.close()


def bar(total: int, initial: int, description: str) -> tqdm.tqdm:
  """A bar on stderr: steps done, ETA, and a postfix; at most two lines a second, none on other processes."""
  return tqdm.tqdm(total=total, initial=initial, desc=description, unit='step', mininterval=0.5, dynamic_ncols=True,
                   disable=jax.process_index() != 0)


def batches(iterator):
  """Wraps an iterator of evaluation batches in a bar."""
  return tqdm.tqdm(iterator, desc='evaluating', unit='batch', mininterval=0.5, dynamic_ncols=True,
                   disable=jax.process_index() != 0)
