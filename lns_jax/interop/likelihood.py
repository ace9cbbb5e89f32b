"""Log-likelihoods of given tokens behind given tokens, in batches of a few compiled shapes, on every device."""

import bisect
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import sharding
from lns_jax.config import MeshConfig, ModelConfig
from lns_jax.errors import UserError
from lns_jax.models import loss, transformer

BATCH_TOKENS = 4096  # positions of a device whose states exist at a time, where the size of a batch is not given
CHUNK = 32  # targets of a row whose logits exist at a time

# What is to be scored: (tokens before, tokens to score).
Pair = tuple[Sequence[int], Sequence[int]]
# A row: the tokens read, and of each pair that reads them its number and its targets, the last predictions of the row.
Row = tuple[tuple[int, ...], list[tuple[int, Sequence[int]]]]


def lengths(longest: int) -> list[int]:
  """Compiled lengths: 32, 48, 64, 96, ... up to the longest: padding is a fifth of a row on average."""
  found = [n for k in range(5, 32) for n in (1 << k, 3 << (k - 1)) if n < longest]
  return [*found, longest]


def counts(n: int) -> int:
  """Compiled number of targets of a row: the first of 4, 16, 64, ... that has room for n."""
  return next(4 ** k for k in range(1, 32) if 4 ** k >= n)


class Scorer:
  """Scores tokens by a decoder.

  Args:
    config, params: in either layout.
    max_length: tokens that the model reads at most.
    batch_size: rows of a batch; 0: as many as BATCH_TOKENS allows, by length.
    mesh: that on which the parameters lie already; None: they are put, whole, on every device.
  """

  def __init__(self, config: ModelConfig, params, *, max_length: int, batch_size: int = 0, mesh=None):
    self.max_length = max_length
    self._lengths = lengths(max_length)
    self._mesh = mesh or sharding.make_mesh(MeshConfig())
    self._wanted = batch_size
    self._params = params if mesh else jax.device_put(params, sharding.replicated(self._mesh))
    where, rows = jax.tree.map(lambda x: x.sharding, self._params), sharding.batch(self._mesh)
    self._step = jax.jit(lambda params, *batch: _score(config, params, *batch),
                         in_shardings=(where, rows, rows, rows, rows),
                         out_shardings=sharding.replicated(self._mesh))

  def score(self, pairs: Sequence[Pair], tick: Callable[[int], None] = lambda done: None) -> list[tuple[float, bool]]:
    """Of each pair: (summed log-probability in nats of its tokens behind those before, whether each is the likeliest).

    Pairs that differ in their last tokens alone, as the letters of a choice, share a row. Of a pair that is longer
    than the model reads the left end is cut.

    Args:
      tick: called with the number of pairs that are done since the last call.

    Raises:
      UserError: nothing before, nothing to score, more of it than the model reads, or a number that is not finite.
    """
    found = [(0.0, False)] * len(pairs)
    for batch in self._batches(_rows(pairs, self.max_length)):
      nats_BN, likeliest_BN = self._run(batch)
      for (_, wanted), nats_N, likeliest_N in zip(batch, nats_BN, likeliest_BN):
        at = 0
        for number, targets in wanted:
          own = slice(at, at + len(targets))
          at += len(targets)
          found[number] = -float(np.sum(nats_N[own], dtype=np.float64)), bool(np.all(likeliest_N[own]))
          if not np.isfinite(found[number][0]):
            raise UserError(f'the log-likelihood of request {number} is {found[number][0]}: a weight or a state of the '
                            'model is not finite, or a token is none of its vocabulary.')
      tick(sum(len(wanted) for _, wanted in batch))
    return found

  def _length(self, row: Row) -> int:
    return self._lengths[bisect.bisect_left(self._lengths, len(row[0]))]

  def _batch_size(self, T: int) -> int:
    parts = sharding.batch_parts(self._mesh)
    return -(-self._wanted // parts) * parts if self._wanted else parts * max(1, BATCH_TOKENS // T)

  def _batches(self, rows: list[Row]) -> Iterator[list[Row]]:
    """Rows that stand near each other in length, the longest first: what memory has no room for fails at once."""
    rows = sorted(rows, key=lambda row: (-len(row[0]), row[0]))
    while rows:
      size = self._batch_size(self._length(rows[0]))
      yield rows[:size]
      rows = rows[size:]

  def _run(self, batch: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """(nats [B, N], whether likeliest [B, N]) of the targets of each row in turn; rows of padding fill the batch."""
    T = self._length(batch[0])
    B, N = self._batch_size(T), counts(max(sum(len(targets) for _, targets in wanted) for _, wanted in batch))
    tokens, (at, targets) = np.zeros((B, T), np.int32), np.zeros((2, B, N), np.int32)
    weights = np.zeros((B, N), np.float32)
    for b, (ids, wanted) in enumerate(batch):
      tokens[b, :len(ids)] = ids
      flat = [(len(ids) - len(own) + i, token) for _, own in wanted for i, token in enumerate(own)]
      at[b, :len(flat)], targets[b, :len(flat)] = zip(*flat)
      weights[b, :len(flat)] = 1
    where = sharding.batch(self._mesh)
    with sharding.use(self._mesh):
      placed = [jax.device_put(v, where) for v in (tokens, at, targets, weights)]
      return jax.device_get(self._step(self._params, *placed))


def _rows(pairs: Sequence[Pair], max_length: int) -> list[Row]:
  """The rows that all pairs need, checked and cut."""
  rows = {}
  for number, (before, wanted) in enumerate(pairs):
    if not len(before) or not len(wanted):
      raise UserError(f'request {number} has {len(before)} tokens of context and {len(wanted)} to score; '
                      'both need one or more.')
    if len(wanted) > max_length:
      raise UserError(f'request {number} has {len(wanted)} tokens to score, and the model reads {max_length}.')
    ids = (*before, *wanted)[-max_length - 1:-1]
    rows.setdefault(tuple(map(int, ids)), []).append((number, wanted))
  return list(rows.items())


def _score(config: ModelConfig, params, tokens_BT, at_BN, targets_BN, weights_BN):
  """Nats of targets [B, N], and whether each is the likeliest token there; behind a row's tokens lies what none reads.

  at_BN: position in the row whose prediction the target is. Logits exist for CHUNK targets of a row at a time.
  """
  normed_BTD, _ = transformer.before_head(config, params, {'tokens': tokens_BT})
  family = transformer.family(config)
  def some(part):
    at_BC, targets_BC, weights_BC = part
    picked_BCD = jnp.take_along_axis(normed_BTD, at_BC[..., None], axis=1)
    logits_BCV = family.logits(config, params, picked_BCD)
    return loss.token_losses(logits_BCV, targets_BC, weights_BC), jnp.argmax(logits_BCV, axis=-1) == targets_BC
  B, N = at_BN.shape
  C = min(N, CHUNK)
  split = lambda v: v.reshape(B, N // C, C).swapaxes(0, 1)
  parts = jax.lax.map(some, tuple(split(v) for v in (at_BN, targets_BN, weights_BN)))
  return jax.tree.map(lambda v: v.swapaxes(0, 1).reshape(B, N), parts)
