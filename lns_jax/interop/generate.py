"""Text from a model, token by token, with the cache of `lns_jax.models.decode`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.layers import rope
from lns_jax.models import decode, layout

# Tokens of prompts that are read at a time; shorter ones are padded to a power of two, so that few programs serve all.
PIECE = 512
SHORTEST = 16
# The cache's slots are a multiple of this, for the same reason.
SLOTS = 64


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is drawn from logits: divided by temperature, then cut to top_k, then to top_p.

  temperature: 0 takes the likeliest token. top_k: the k likeliest and their equals stay, 0: all. top_p: the likeliest
  that together have this probability stay, the last of them included. Order and definition are transformers'.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    if not (math.isfinite(self.temperature) and self.temperature >= 0):
      raise UserError(f'temperature = {self.temperature} must be a number of at least 0, which takes the likeliest.')
    if self.top_k < 0:
      raise UserError(f'top_k = {self.top_k} must be at least 0, which keeps all tokens.')
    if not 0 < self.top_p <= 1:
      raise UserError(f'top_p = {self.top_p} must be above 0 and at most 1, which keeps all tokens.')


def cut(logits_BV: jax.Array, how: Sampling) -> jax.Array:
  """Logits over the temperature, -inf where a token may not be drawn."""
  logits_BV = logits_BV / how.temperature
  if 0 < how.top_k < logits_BV.shape[-1]:
    kth_B1 = jax.lax.top_k(logits_BV, how.top_k)[0][:, -1:]
    logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
  if how.top_p < 1:
    order_BV = jnp.argsort(logits_BV, axis=-1)  # from the least likely up
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    stays_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, axis=-1), axis=-1) > 1 - how.top_p
    stays_BV = stays_BV.at[:, -1].set(True)
    kept_BV = jnp.put_along_axis(jnp.zeros_like(stays_BV), order_BV, stays_BV, axis=-1, inplace=False)
    logits_BV = jnp.where(kept_BV, logits_BV, -jnp.inf)
  return logits_BV


@functools.partial(jax.jit, static_argnames='how')
def choose(logits_BV: jax.Array, seed, rows_B: jax.Array, number, *, how: Sampling) -> jax.Array:
  """The next token of each row, int32 [B]; -1 where its logits are not finite.

  A draw depends on the seed, the row's number in `rows_B` and the number of the new token, and on no other row.
  """
  if not how.temperature:
    chosen_B = jnp.argmax(logits_BV, axis=-1)
  else:
    keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), number))(rows_B)
    chosen_B = jax.vmap(jax.random.categorical)(keys_B, cut(logits_BV, how))
  return jnp.where(jnp.all(jnp.isfinite(logits_BV), axis=-1), chosen_B, -1).astype(jnp.int32)


_extend = jax.jit(functools.partial(decode.extend, last=True), static_argnums=0, donate_argnums=3)


def _padded(n: int) -> int:
  """The tokens that are read for a prompt of n."""
  return max(SHORTEST, 1 << (n - 1).bit_length()) if n <= PIECE else -(-n // PIECE) * PIECE


def _read(config, params, prompts: Sequence[Sequence[int]], max_new: int):
  """(logits [B, V] behind the prompts, their cache with room for max_new tokens)."""
  N = _padded(max(map(len, prompts)))
  first = [N - len(p) for p in prompts]
  tokens_BT = np.zeros((len(prompts), N), np.int32)
  for row, start, prompt in zip(tokens_BT, first, prompts):
    row[start:] = prompt
  cache = decode.init(config, len(prompts), -(-(N + max_new) // SLOTS) * SLOTS, first)
  for at in range(0, N, PIECE):
    logits_BV, cache = _extend(config, params, tokens_BT[:, at:at + PIECE], cache)
  return logits_BV, cache


def check(config: config_lib.ModelConfig, prompts: Sequence[Sequence[int]], max_new: int):
  """Refuses prompts that the model cannot read, or cannot continue by max_new tokens."""
  for i, prompt in enumerate(prompts):
    if not len(prompt):
      raise UserError(f'prompt {i + 1} has no token to start from.')
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= config.vocab_size:
      raise UserError(f'prompt {i + 1} holds token {low if low < 0 else high}, but the vocabulary of the model is '
                      f'0 to {config.vocab_size - 1}.')
  if max_new < 0:
    raise UserError(f'max_new = {max_new} must be at least 0.')
  most, why = _limit(config)
  longest = max(map(len, prompts), default=0)
  if most and longest + max_new > most:
    raise UserError(f'a prompt of {longest} tokens and {max_new} new ones are more than {most}, {why}.')


def _limit(config: config_lib.ModelConfig) -> tuple[int, str]:
  """(tokens that a row may have at most, 0: any number; why)."""
  scaling = config.rope_scaling
  if config.positions == 'learned':
    return config.max_positions, 'the positions that the model has learned'
  if scaling.kind in rope.BY_LENGTH:
    return scaling.original_length, (f'where rope_scaling {scaling.kind} changes the positions of the tokens before, '
                                     'whose keys are kept')
  return 0, ''


def stream(config: config_lib.ModelConfig, params, prompts: Sequence[Sequence[int]], *, max_new: int,
           eos_id: int | Sequence[int] | None = None, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
           seed: int = 0, stop: Callable[[list[int]], bool] | None = None,
           rows: Sequence[int] | None = None) -> Iterator[list[int | None]]:
  """Continues prompts, all at once.

  Args:
    prompts: ids of each row, BOS included where there is one.
    max_new: new tokens of a row at most.
    eos_id: the token, or tokens, that end a row.
    temperature, top_p, top_k: see `Sampling`.
    seed: of the draws. With the same one a row gets the same text, whatever other rows there are.
    stop: given a row's new ids so far, whether it ends.
    rows: numbers of the rows, which their draws go by; 0, 1, ... by default.

  Yields:
    After each step the new id of every row; None for one that has ended, also at the step at which EOS ends it.

  Raises:
    UserError: see `check` and `Sampling`; or logits are not finite.
  """
  how = Sampling(temperature, top_k, top_p)
  check(config, prompts, max_new)
  return _steps(config, params, prompts, max_new, _set(eos_id), how, seed, stop, rows)


def _set(eos_id) -> set[int]:
  return set() if eos_id is None else {eos_id} if isinstance(eos_id, (int, np.integer)) else set(eos_id)


def _steps(config, params, prompts, max_new, ends: set[int], how: Sampling, seed, stop, rows):
  if not prompts or not max_new:
    return
  # A scan would first copy each layer's weights out of the stack, which on a CPU costs as much as using them.
  config, params = dataclasses.replace(config, loop='unrolled'), layout.unstack(params)
  rows_B = np.arange(len(prompts)) if rows is None else np.asarray(rows)
  logits_BV, cache = _read(config, params, prompts, max_new)
  found, open_rows = [[] for _ in prompts], set(range(len(prompts)))
  for n in range(max_new):
    chosen = choose(logits_BV, seed, rows_B, n, how=how)
    if n + 1 < max_new:  # runs while the caller reads this step's tokens
      logits_BV, cache = _extend(config, params, chosen[:, None], cache)
    new = [None] * len(prompts)
    for i, token in enumerate(np.asarray(chosen).tolist()):
      if i not in open_rows:
        continue
      if token < 0:
        raise UserError(f'the logits of row {i + 1} are not finite at its new token {n + 1}.')
      if token in ends:
        open_rows.remove(i)
        continue
      new[i] = token
      found[i].append(token)
      if stop is not None and stop(found[i]):
        open_rows.remove(i)
    yield new
    if not open_rows:
      return


def generate(config: config_lib.ModelConfig, params, prompts: Sequence[Sequence[int]], *, max_new: int,
             eos_id: int | Sequence[int] | None = None, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
             seed: int = 0, stop: Callable[[list[int]], bool] | None = None, rows: Sequence[int] | None = None,
             tick: Callable[[list[int | None]], None] | None = None) -> list[list[int]]:
  """The new ids of each prompt, without EOS; arguments and errors as of `stream`. tick: called with each step's."""
  found = [[] for _ in prompts]
  for new in stream(config, params, prompts, max_new=max_new, eos_id=eos_id, temperature=temperature, top_p=top_p,
                    top_k=top_k, seed=seed, stop=stop, rows=rows):
    for ids, token in zip(found, new):
      if token is not None:
        ids.append(token)
    if tick is not None:
      tick(new)
  return found


def before(text: str, stops: Sequence[str]) -> str:
  """The text up to the first of the stop strings in it."""
  found = [at for at in map(text.find, stops) if at >= 0]
  return text[:min(found)] if found else text


def at_strings(tokenizer, stops: Sequence[str]) -> Callable[[list[int]], bool] | None:
  """What `stream` takes as `stop` to end a row once its text holds one of the strings; None without strings."""
  if not stops:
    return None
  longest = max(map(len, stops))
  # No token is shorter than a byte, and a character has 4 at most: so much of the end holds all that is new.
  tail = 4 * longest + 64
  return lambda ids: any(s in tokenizer.decode(ids[-tail:]) for s in stops)
