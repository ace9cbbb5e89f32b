"""Multiple-choice questions from a JSONL file, as rows of tokens: one row a choice."""

import codecs
import dataclasses
import hashlib
import json
import pathlib
from typing import NamedTuple

import numpy as np

from lns_jax.data import hashing
from lns_jax.data.order import Batch
from lns_jax.data.tokenizers import Tokenizer
from lns_jax.errors import UserError, nearest

LAYOUTS = ('{"context": "...", "choices": ["...", "..."], "answer": 0} or '
           '{"question": "...", "choices": {"text": [...], "label": [...]}, "answerKey": "B"}')


class Question(NamedTuple):
  """What stands on one line. place: file and line, for messages. answer: position of the right choice, from 0."""

  place: str
  context: str
  choices: list[str]
  answer: int


@dataclasses.dataclass(frozen=True)
class Questions:
  """Questions as rows.

  Attributes:
    rows: `choices` rows a question, in order: 'tokens', 'targets', 'segment_ids' int32 [T], 'weights' float32 [T], 1 on
      the targets that belong to the choice, 'right' float32 [], 1 on the right choice. A question with fewer choices
      is filled up with rows of padding. T: length of the longest row.
    choices: K, those of the question with most.
    chance: share of right answers by guessing.
    cut: number of questions whose context was cut.
    file_hash: sha256 (hex) of the file. hash: of the file and of all that decides the rows.
  """

  rows: list[Batch]
  choices: int
  chance: float
  cut: int
  file_hash: str
  hash: str

  def __len__(self) -> int:
    return len(self.rows) // self.choices


def read(path, tokenizer: Tokenizer, T: int, *, bos: int | None) -> Questions:
  """Reads and tokenises a file of questions, one JSON object a line.

  A line is {"context", "choices": [text, ...], "answer": position from 0}, or, as ARC and other sets on Hugging Face
  have it, {"question", "choices": {"text": [...], "label": [...]}, "answerKey": a label}, whose context is then, as
  in lm-eval, 'Question: ...\\nAnswer:'; each of the parts may be written either way.

  Tokens are made as lm-eval makes them: one space joins context and choice, unless white space stands there or there
  is no context; white space at the end of the context counts as the choice's; context and whole text are encoded, and
  the tokens of the choice are those of the whole text beyond the number of the context's. (Where the tokenizer joins
  the two, its whole text is what the model reads.) Of a row that is longer than T the left end is cut, BOS included.

  Args:
    T: positions that the model was trained with.
    bos: token before the context; None: nothing.

  Raises:
    UserError: the file cannot be read or holds no question; a line is malformed, has fewer than two choices, an answer
      that is none of them, or a choice that adds no token or has more than T.
  """
  path = pathlib.Path(path).expanduser()
  asked = questions(path)
  K = max(len(q.choices) for q in asked)
  strings = [texts(q.context, choice) for q in asked for choice in q.choices]
  whole = tokenizer.encode_batch([context + choice for context, choice in strings])
  contexts = tokenizer.encode_batch([context for context, _ in strings])
  start = np.array([] if bos is None else [bos], np.int32)
  rows, cut, at = [], 0, 0
  for q in asked:
    own = []
    for number in range(1, len(q.choices) + 1):
      own.append(_ids(q, number, np.concatenate([start, whole[at]]), len(start) + len(contexts[at]), T))
      at += 1
    cut += any(len(ids) > T + 1 for ids, _ in own)
    rows.append([(ids[-T - 1:], n) for ids, n in own])
  longest = max(len(ids) - 1 for own in rows for ids, _ in own)
  flat = [_row(*own[k], longest, k == q.answer) if k < len(own) else _padding(longest)
          for q, own in zip(asked, rows) for k in range(K)]
  digest = hashing.of_file(path)
  settings = hashlib.sha256(f'{digest} {tokenizer.hash} {T} {bos}'.encode()).hexdigest()
  return Questions(flat, K, float(np.mean([1 / len(q.choices) for q in asked])), cut, digest, settings)


def texts(context: str, choice: str) -> tuple[str, str]:
  """(context, choice) that, joined, are the text, the white space between them at the start of the choice."""
  bare = context.rstrip()
  between = context[len(bare):] or (' ' if bare and not choice[:1].isspace() else '')
  return bare, between + choice


def _ids(q: Question, number: int, ids: np.ndarray, before: int, T: int) -> tuple[np.ndarray, int]:
  """(ids, how many of them belong to the choice), checked."""
  n = len(ids) - before
  if n < 1:
    raise UserError(f'{q.place}: choice {number} adds no token to the context; give choices that are text.')
  if n > T:
    raise UserError(f'{q.place}: choice {number} has {n} tokens, and the model reads {T}; shorten it.')
  if not before:
    raise UserError(f'{q.place} has no context, and the model knows no token that starts a text; give a context.')
  return ids, n


def _row(ids: np.ndarray, n: int, T: int, right: bool) -> Batch:
  """A row of T from ids whose last n are the choice's."""
  row, size = _padding(T), len(ids) - 1
  row['tokens'][:size], row['targets'][:size], row['segment_ids'][:size] = ids[:-1], ids[1:], 1
  row['weights'][size - n:size] = 1
  return row | {'right': np.float32(right)}


def _padding(T: int) -> Batch:
  return {name: np.zeros(T, np.int32) for name in ('tokens', 'targets', 'segment_ids')} | {
      'weights': np.zeros(T, np.float32), 'right': np.float32(0)}


def questions(path: pathlib.Path) -> list[Question]:
  """The questions of a file, checked but not tokenised. Raises UserError as `read` does."""
  try:
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b'\n')
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error.strerror}.') from None
  found = [_question(f'{path} line {number}', line) for number, line in enumerate(lines, 1) if line.strip()]
  if not found:
    raise UserError(f'{path} holds no questions; a line of it is to be {LAYOUTS}.')
  return found


def _question(place: str, line: bytes) -> Question:
  try:
    record = json.loads(line.decode())
  except (ValueError, RecursionError) as error:  # of JSON and of UTF-8
    raise UserError(f'{place} is not a JSON object: {error}.') from None
  if not isinstance(record, dict):
    raise UserError(f'{place} is not a JSON object but {type(record).__name__}; it is to be {LAYOUTS}.')
  choices, labels = _choices(place, record)
  name = _either(place, record, 'context', 'question')
  if not _is_text(record[name]):
    raise UserError(f'{place}: {name!r} is not text but {type(record[name]).__name__}.')
  context = record[name] if name == 'context' else f'Question: {record[name]}\nAnswer:'
  return Question(place, context, choices, _answer(place, record, choices, labels))


def _either(place: str, record: dict, *names: str) -> str:
  """The first of the names that the record has."""
  for name in names:
    if name in record:
      return name
  raise UserError(f'{place} has no field {" or ".join(map(repr, names))}.{nearest(names[0], record)}')


def _is_text(value) -> bool:
  """A str that is text: JSON allows a lone surrogate, which no tokenizer takes."""
  return isinstance(value, str) and not any('\ud800' <= c <= '\udfff' for c in value)


def _choices(place: str, record: dict) -> tuple[list[str], list | None]:
  """(choices, their labels)."""
  found, labels = record[_either(place, record, 'choices')], None
  if isinstance(found, dict):
    found, labels = found[_either(place, found, 'text')], found[_either(place, found, 'label')]
  if not isinstance(found, list) or not all(map(_is_text, found)):
    raise UserError(f'{place}: the choices are not a list of texts.')
  if len(found) < 2:
    raise UserError(f'{place} has {len(found)} choices, which is no question; two or more are needed.')
  if labels is not None and (not isinstance(labels, list) or len(labels) != len(found)):
    raise UserError(f'{place}: the {len(found)} choices need a list of as many labels.')
  return found, labels


def _answer(place: str, record: dict, choices: list[str], labels: list | None) -> int:
  name = _either(place, record, 'answer', 'answerKey')
  answer = record[name]
  if name == 'answerKey' and labels is not None:
    if answer not in labels:
      raise UserError(f'{place}: answerKey {answer!r} is none of the labels {", ".join(map(str, labels))}.')
    return labels.index(answer)
  if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
    raise UserError(f'{place}: answer {answer!r} is none of the {len(choices)} choices, whose numbers are '
                    f'0..{len(choices) - 1}.')
  return answer
