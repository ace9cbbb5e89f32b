"""metrics.jsonl, TensorBoard and the progress bar of a run. Only process 0 writes."""

import json
import pathlib
import time

import jax
import tqdm

from lns_jax import files
from lns_jax.errors import UserError


def read(path: pathlib.Path) -> list[dict]:
  """Lines of a metrics.jsonl; a last line that a kill cut short is left out. Raises UserError for a damaged one."""
  try:
    lines = path.read_text(errors='replace').splitlines()
  except FileNotFoundError:
    return []
  except OSError as e:
    raise UserError(f'{path} cannot be read: {e.strerror}.') from None
  records = []
  for i, line in enumerate(lines):
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      if i + 1 == len(lines):
        break
      record = None
    if not isinstance(record, dict) or not isinstance(record.get('step'), int):
      raise UserError(f'{path}, line {i + 1} is damaged; remove that line and run the command again.')
    records.append(record)
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
      self._board = Board(workdir / 'tensorboard', start_step)

  def write(self, step: int, record: dict):
    """One line {'step': step, ...}; vectors go to TensorBoard as one scalar an entry."""
    if self._file is None:
      return
    record = files.finite(record)
    self._file.write(json.dumps({'step': step, **record}) + '\n')
    if self._board is not None:
      self._board.write(step, record)

  def close(self):
    for sink in (self._file, self._board):
      if sink is not None:
        sink.close()


class Board:
  """A TensorBoard event file, written at once.

  Not tensorboardX's SummaryWriter: it hands events to a thread through a queue between processes, and a run that was
  done has been seen to wait for that thread for ever.
  """

  def __init__(self, folder: pathlib.Path, start_step: int):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2
    folder.mkdir(exist_ok=True)
    self._event = event_pb2.Event
    # File names count seconds: the suffix tells starts apart.
    self._file = EventsWriter(str(folder / 'events'), filename_suffix=f'.{time.time_ns()}')
    # TensorBoard hides the step of a start and what is later in older files.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._file.write_event(self._event(wall_time=time.time(), step=start_step + 1, session_log=start))

  def write(self, step: int, record: dict):
    """All numbers of a record as one event; vectors as one scalar an entry."""
    from tensorboardX.proto.summary_pb2 import Summary
    values = []
    for name, value in record.items():
      entries = {f'{name}/{i}': v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
      values += [Summary.Value(tag=tag, simple_value=v) for tag, v in entries.items() if isinstance(v, (int, float))]
    self._file.write_event(self._event(wall_time=time.time(), step=step, summary=Summary(value=values)))
    self._file.flush()

  def close(self):
    """Leaves the file whole."""
    self._file.close()


def bar(total: int, initial: int, description: str) -> tqdm.tqdm:
  """A bar on stderr: steps done, ETA, and a postfix; at most two lines a second, none on other processes."""
  return tqdm.tqdm(total=total, initial=initial, desc=description, unit='step', mininterval=0.5, dynamic_ncols=True,
                   disable=jax.process_index() != 0)


def batches(iterator, total: int):
  """Wraps an iterator of evaluation batches in a bar."""
  return tqdm.tqdm(iterator, total=total, desc='evaluating', unit='batch', mininterval=0.5, dynamic_ncols=True,
                   disable=jax.process_index() != 0)
