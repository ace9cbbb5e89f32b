"""Extractive question answering: a model with model.head = squad on a file of the SQuAD v1.1 form.

A question and its context become rows [CLS] question [SEP] context [SEP]; a long context is cut into windows that
overlap. The answer is the pair of positions of the context, the last not before the first, with the largest sum of
start and end logit over all windows. Scores are those of the official script of v1.1: per cent of exact matches, and mean F1
of words, of the best of each question's reference answers, after lower-casing and without punctuation and articles.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import re
import string
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.data import masking
from lns_jax.data.tokenizers import Tokenizer
from lns_jax.errors import UserError
from lns_jax.models import encoder, transformer

MAX_QUESTION, MAX_ANSWER = 64, 30  # tokens, as in BERT's own script
Progress = Callable[[int, int], None]  # (questions answered, questions)


@dataclasses.dataclass(frozen=True)
class Question:
  """One question. answers: (text, first character in the context) of each reference."""

  id: str
  text: str
  context: str
  answers: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Window:
  """A row and what it is of. question: its number. spans: [T, 2] characters of the context by position."""

  row: dict[str, np.ndarray]
  question: int
  spans: np.ndarray


def read(path) -> list[Question]:
  """The questions of a file of the SQuAD v1.1 form. Raises UserError when it is none."""
  path = pathlib.Path(path).expanduser()
  try:
    articles = json.loads(path.read_text(encoding='utf-8'))['data']
    found = [Question(str(q['id']), q['question'], paragraph['context'],
                      tuple((a['text'], int(a['answer_start'])) for a in q['answers']))
             for article in articles for paragraph in article['paragraphs'] for q in paragraph['qas']]
  except OSError as e:
    raise UserError(f'{path} cannot be read: {e.strerror or e}.') from None
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(f'{path} is not a file of the SQuAD v1.1 form ({type(e).__name__}: {e}).') from None
  if not found:
    raise UserError(f'{path} holds no question.')
  for q in found:
    if not q.answers:
      raise UserError(f'{path}: question {q.id} has no answer, as in SQuAD 2.0; questions of v1.1 all have one.')
  return found


def windows(questions: Sequence[Question], tokenizer: Tokenizer, T: int, stride: int) -> Iterator[Window]:
  """Rows of T positions: 'tokens', 'segment_ids', 'token_types' (1: context and its [SEP]), 'weights' (1: context).

  stride: tokens from the start of a window to that of the next.
  """
  for number, q in enumerate(questions):
    question = tokenizer.encode(q.text.strip())[:MAX_QUESTION]
    ids, spans = tokenizer.spans(q.context)
    room = T - len(question) - 3
    if room < stride:
      raise UserError(f'rows of {T} positions leave {room} for the context of question {q.id}, fewer than the stride '
                      f'of {stride}; a longer row or a smaller stride would do.')
    for start in range(0, max(len(ids) - room + stride, 1), stride):
      part = ids[start:start + room]
      yield Window(_row(question, part, T, tokenizer), number, _placed(spans[start:start + room], len(question) + 2, T))


def _row(question: np.ndarray, context: np.ndarray, T: int, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
  tokens = [tokenizer.bos_id, *question, tokenizer.eos_id, *context, tokenizer.eos_id]
  row = {name: np.zeros(T, np.int32) for name in ('tokens', 'segment_ids', 'token_types')}
  first, end = len(question) + 2, len(tokens)
  row['tokens'][:end], row['segment_ids'][:end], row['token_types'][first:end] = tokens, 1, 1
  return row | {'weights': _placed(np.ones(len(context), np.float32), first, T)}


def _placed(values: np.ndarray, first: int, T: int) -> np.ndarray:
  """values at positions first, first + 1, ... of T; 0 elsewhere."""
  whole = np.zeros((T, *values.shape[1:]), values.dtype)
  whole[first:first + len(values)] = values
  return whole


def rows(questions: Sequence[Question], tokenizer: Tokenizer, T: int, stride: int) -> Iterator[dict[str, np.ndarray]]:
  """The windows that hold the first reference answer, with 'labels' [2]: what a loss, and measures of it, read."""
  for w in windows(questions, tokenizer, T, stride):
    text, first = questions[w.question].answers[0]
    inside = (w.spans[:, 0] < first + len(text)) & (w.spans[:, 1] > first) & (w.row['weights'] > 0)
    at = np.flatnonzero(inside)
    if len(at) and w.spans[at[0], 0] <= first and w.spans[at[-1], 1] >= first + len(text):
      yield w.row | {'labels': np.array([at[0], at[-1]], np.int32)}


@functools.partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, params, batch):
  x_BTD, _ = transformer.before_head(config, params, batch)
  return encoder.among(encoder.logits(config, params, x_BTD), batch['weights'] > 0)


def best_span(start_T: np.ndarray, end_T: np.ndarray, may_T: np.ndarray) -> tuple[float, int, int]:
  """(sum, first, last) of the best pair of positions that may answer, MAX_ANSWER tokens at most, the first of equals."""
  first, last = np.indices((len(start_T), len(end_T)))
  allowed = (last >= first) & (last < first + MAX_ANSWER) & may_T[:, None] & may_T
  sums = np.where(allowed, start_T[:, None] + end_T, -np.inf)
  at = np.unravel_index(np.argmax(sums), sums.shape)
  return float(sums[at]), *map(int, at)


def predict(config: ModelConfig, params, tokenizer: Tokenizer, questions: Sequence[Question], *, T: int = 384,
            stride: int = 128, batch_size: int = 16, progress: Progress = lambda done, of: None) -> dict[str, str]:
  """{id of a question: its answer, as it stands in the context}.

  Args:
    T: positions of a row. stride: see `windows`. batch_size: rows at a time.

  Raises:
    UserError: another head, rows longer than the model's positions, a tokenizer that does not fit, or logits that are
      not finite.
  """
  if config.family != 'encoder' or config.head != 'squad':
    raise UserError('answers need a model of family encoder with model.head = squad.')
  masking.check(tokenizer, T, hidden=False)
  best = {}
  waiting = []
  def answer():
    filled = waiting + waiting[-1:] * (batch_size - len(waiting))  # one shape, one program
    batch = {k: np.stack([w.row[k] for w in filled]) for k in filled[0].row}
    logits = np.asarray(_logits(config, params, batch), np.float64)
    for w, start_end in zip(waiting, logits):
      if np.isnan(start_end).any():
        raise UserError(f'the logits of question {questions[w.question].id} are not finite.')
      total, first, last = best_span(*start_end.T, w.row['weights'] > 0)
      if total > best.get(w.question, (-np.inf, ''))[0]:
        best[w.question] = total, questions[w.question].context[w.spans[first, 0]:w.spans[last, 1]]
    progress(waiting[-1].question + 1, len(questions))
    waiting.clear()
  for w in windows(questions, tokenizer, T, stride):
    waiting.append(w)
    if len(waiting) == batch_size:
      answer()
  if waiting:
    answer()
  return {q.id: best.get(i, (0.0, ''))[1] for i, q in enumerate(questions)}


def normalised(answer: str) -> str:
  """Lower case, without punctuation, articles and double spaces."""
  bare = ''.join(c for c in answer.lower() if c not in string.punctuation)
  return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', bare).split())


def exact(answer: str, reference: str) -> float:
  """1 where both are the same after `normalised`, else 0."""
  return float(normalised(answer) == normalised(reference))


def f1(answer: str, reference: str) -> float:
  """Harmonic mean of precision and recall of the words of both, with their numbers."""
  ours, theirs = normalised(answer).split(), normalised(reference).split()
  shared = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
  return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def scores(answers: dict[str, str], questions: Sequence[Question]) -> dict[str, float]:
  """{'exact_match', 'f1': per cent, 'questions': how many}."""
  def mean(score):
    return 100 * float(np.mean([max(score(answers[q.id], text) for text, _ in q.answers) for q in questions]))
  return {'exact_match': mean(exact), 'f1': mean(f1), 'questions': len(questions)}


def score(config: ModelConfig, params, tokenizer: Tokenizer, path, **kwargs) -> dict[str, float]:
  """`scores` of a model on a file; kwargs: of `predict`. Raises UserError as `read` and `predict` do."""
  questions = read(path)
  return scores(predict(config, params, tokenizer, questions, **kwargs), questions)
