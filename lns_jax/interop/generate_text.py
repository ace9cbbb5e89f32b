"""Prompts in, text out as it is written: what `experiments/generate.py` does."""

import time
from collections.abc import Callable, Sequence

from absl import logging

from lns_jax import sharding
from lns_jax.data.tokenizers import Tokenizer
from lns_jax.distributed import say
from lns_jax.errors import UserError
from lns_jax.interop import generate, text_rules
from lns_jax.interop.load import load_in

TAIL = 16  # tokens of a prompt that its continuation is decoded behind: a space or a character may hang on them
BROKEN = '\ufffd'


class Text:
  """The text of one row, whose tokens come one by one.

  It grows by whole characters, and by nothing that may turn out to be the beginning of a stop string; the stop string
  and what is behind it never come. Attributes: text: what has come. ended: whether there will be no more.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
    self._tokenizer, self._stops = tokenizer, stops
    # Tokens from `at` on are decoded together; up to `read` their text has been taken over.
    self._ids, self._at, self._read = list(prompt[-TAIL:]), 0, len(prompt[-TAIL:])
    self._decoded = ''
    self.text, self.ended = '', False

  def add(self, token: int) -> str:
    """The text that became certain with one more token."""
    self._ids.append(token)
    new = self._new()
    if not new.endswith(BROKEN):
      self._take(new)
    return self._certain(whole=False)

  def end(self) -> str:
    """The text that was held back, once there are no more tokens."""
    self._take(self._new())
    more, self.ended = self._certain(whole=True), True
    return more

  def _new(self) -> str:
    decode = self._tokenizer.decode
    return decode(self._ids[self._at:])[len(decode(self._ids[self._at:self._read])):]

  def _take(self, new: str):
    if new:
      self._decoded += new
      self._at, self._read = self._read, len(self._ids)

  def _certain(self, whole: bool) -> str:
    if self.ended:
      return ''
    found = generate.before(self._decoded, self._stops)
    self.ended = len(found) < len(self._decoded)
    if not (whole or self.ended):
      found = found[:len(found) - max((_begun(found, s) for s in self._stops), default=0)]
    more = found[len(self.text):]
    self.text = found
    return more


def _begun(text: str, stop: str) -> int:
  """How many characters at the end of the text may be the beginning of a stop string."""
  return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class InTurn:
  """Shows rows that are written at once one after the other: the first open one live, the others when it is over."""

  def __init__(self, count: int, show: Callable[[str], None]):
    self._shown, self._open, self._waiting, self._show = 0, [True] * count, [[] for _ in range(count)], show

  def add(self, row: int, text: str):
    """More of the row's text."""
    self._waiting[row].append(text)
    self._advance()

  def close(self, row: int):
    """Nothing more comes of the row."""
    self._open[row] = False
    self._advance()

  def _advance(self):
    while self._shown < len(self._open):
      while self._waiting[self._shown]:
        self._show(self._waiting[self._shown].pop(0))
      if self._open[self._shown]:
        return
      self._show('\n')
      self._shown += 1


def write(path, texts: Sequence[str], *, max_new: int, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
          seed: int = 0, stops: Sequence[str] = (), dtype: str = '', batch_size: int = 8, step: int | None = None,
          show: Callable[[str], None] = lambda text: None) -> dict:
  """Continues texts with the model at `path`.

  Args:
    path: run folder, Hugging Face folder or .gguf file.
    max_new, temperature, top_p, top_k, seed: as of `generate.stream`.
    stops: strings that end a text, which they are no part of.
    dtype: of parameters and compute; the model's own by default.
    batch_size: texts that are written at a time.
    step: checkpoint of a run; the newest sound one by default.
    show: called with the new text as it comes, each text's in whole before the next one's.

  Returns:
    {'texts': the continuations, 'prompt_tokens' and 'new_tokens': of each, 'tokens_per_second': of all rows together
    from the first new token on (None without a second one), 'seconds': of all without loading}.

  Raises:
    UserError: the model cannot be opened, is none of text, has no tokenizer, or cannot read a text.
  """
  generate.Sampling(temperature, top_k, top_p)
  say(f'loading {path}')
  config, params, tokenizer = load_in(dtype, path, step=step, sharding=sharding.share)
  if config.family != 'decoder':
    raise UserError(f'{path} is a model of family {config.family}, which writes no text.')
  if tokenizer is None:
    raise UserError(f'{path} has no tokenizer, so that it can read no text.')
  rules = text_rules.of(path, config, tokenizer)
  bos = [] if rules.bos_id is None else [rules.bos_id]
  prompts = [bos + ids.tolist() for ids in tokenizer.encode_batch(texts)]
  generate.check(config, prompts, max_new)
  _warn(prompts, max_new, rules.length)
  rows = [Text(tokenizer, prompt, stops) for prompt in prompts]
  counts, pace, start = [0] * len(rows), Pace(), time.perf_counter()
  shown = InTurn(len(rows), show)
  for at in range(0, len(rows), batch_size):
    pace.pause()
    part = range(at, min(at + batch_size, len(rows)))
    for new in generate.stream(
        config, params, [prompts[i] for i in part], max_new=max_new, eos_id=tokenizer.eos_ids, temperature=temperature,
        top_p=top_p, top_k=top_k, seed=seed, stop=generate.at_strings(tokenizer, stops), rows=list(part)):
      pace.step(sum(token is not None for token in new))
      for i, token in zip(part, new):
        _grow(i, token, rows[i], counts, shown)
    for i in part:
      _close(i, rows[i], shown)
  return {'texts': [row.text for row in rows], 'prompt_tokens': list(map(len, prompts)), 'new_tokens': counts,
          'tokens_per_second': pace.rate, 'seconds': time.perf_counter() - start}


def _grow(i: int, token: int | None, row: Text, counts: list[int], shown: InTurn):
  if token is None:
    return _close(i, row, shown)
  counts[i] += 1
  shown.add(i, row.add(token))
  if row.ended:
    shown.close(i)


def _close(i: int, row: Text, shown: InTurn):
  if not row.ended:
    shown.add(i, row.end())
    shown.close(i)


class Pace:
  """Tokens a second from the first step of each batch on, which is when its programs are compiled."""

  def __init__(self):
    self._tokens, self._seconds, self._last = 0, 0.0, None

  def pause(self):
    """What comes next is not counted."""
    self._last = None

  def step(self, tokens: int):
    """A step that gave so many tokens is over."""
    now = time.perf_counter()
    if self._last is not None:
      self._tokens, self._seconds = self._tokens + tokens, self._seconds + now - self._last
    self._last = now

  @property
  def rate(self) -> float | None:
    """None before a second step."""
    return self._tokens / self._seconds if self._tokens else None


def _warn(prompts: Sequence[Sequence[int]], max_new: int, length: int):
  longest = max(map(len, prompts), default=0)
  if length and longest + max_new > length:
    logging.warning('%d tokens of a prompt and %d new ones are more than the %d that the model is for; what it writes '
                    'beyond them may be worse.', longest, max_new, length)
