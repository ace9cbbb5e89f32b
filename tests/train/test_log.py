"""What the log of a run shows after it was killed and started again."""

import contextlib
import struct
import threading

from tensorboardX.proto import event_pb2

import pytest

from lns_jax.errors import UserError
from lns_jax.train import log


def write(workdir, start_step, steps):
  with contextlib.closing(log.Writer(workdir, start_step, tensorboard=True)) as writer:
    for step in steps:
      writer.write(step, {'loss': float(f'{start_step}.{step}')})


def events(path):
  """Events of one file: records of length (8 bytes), its checksum (4), the event, its checksum (4)."""
  data, at = path.read_bytes(), 0
  while at < len(data):
    size, = struct.unpack_from('<Q', data, at)
    yield event_pb2.Event.FromString(data[at + 12:at + 12 + size])
    at += size + 16


def shown(workdir) -> dict[int, float]:
  """Losses by step under TensorBoard's rule: the start of a session hides what is at its step or later."""
  found = {}
  for path in sorted((workdir / 'tensorboard').iterdir()):
    for event in events(path):
      if event.session_log.status == event_pb2.SessionLog.START:
        found = {step: value for step, value in found.items() if step < event.step}
      found |= {event.step: round(v.simple_value, 3) for v in event.summary.value}
  return found


def test_steps_that_a_killed_run_repeats_are_shown_once_and_none_is_lost(tmp_path):
  write(tmp_path, 0, [1, 2, 3, 4])
  write(tmp_path, 2, [3])
  expected = {1: 0.1, 2: 0.2, 3: 2.3}
  assert shown(tmp_path) == expected
  assert {r['step']: r['loss'] for r in log.read(tmp_path / 'metrics.jsonl')} == expected


@pytest.mark.parametrize('line', ['[1]', '3', 'null', '{}', '{"step": "x"}', '{"step": 2', '', '\xff'])
def test_a_line_that_is_no_record_is_named(line, tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'.encode('latin-1'))
  with pytest.raises(UserError, match='metrics.jsonl, line 2 is damaged; remove that line'):
    log.read(path)


def test_a_last_line_cut_short_is_left_out_and_a_folder_is_refused(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2, "lo')
  assert log.read(path) == [{'step': 1}] and log.read(tmp_path / 'none') == []
  with pytest.raises(UserError, match='cannot be read: Is a directory'):
    log.read(tmp_path)


def test_a_run_that_starts_anew_shows_nothing_of_the_one_before(tmp_path):
  write(tmp_path, 0, [1, 2, 3])
  write(tmp_path, 0, [1])
  assert shown(tmp_path) == {1: 0.1}


def test_no_thread_writes_that_a_finished_run_would_have_to_wait_for(tmp_path):
  """tensorboardX's SummaryWriter has one, and a run has hung on it."""
  before = threading.active_count()
  with contextlib.closing(log.Writer(tmp_path, 0, tensorboard=True)) as writer:
    writer.write(1, {'loss': 1.0, 'variance': [0.5, 0.25]})
    assert threading.active_count() == before
    (path,) = (tmp_path / 'tensorboard').iterdir()
    *_, last = events(path)  # on disk before the file is closed
    assert {v.tag: v.simple_value for v in last.summary.value} == {'loss': 1.0, 'variance/0': 0.5, 'variance/1': 0.25}
