"""Hidden states by layer as points in a plane: PCA or t-SNE of a bounded number of tokens."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import finite
from lns_jax.depth.states import INPUTS
from lns_jax.errors import UserError

METHODS = ('pca', 'tsne')
LEAST = 3  # tokens that make a picture


def project(config: ModelConfig, params, batches, *, method: str = 'pca', tokens: int = 1000, per_sequence: int = 16,
            at: Sequence[int] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
  """Points for a scatter plot of every chosen state, each state projected for itself.

  Args:
    batches: read until there are enough tokens; memory is that of the tokens.
    method: 'pca', in float64; or 'tsne', scikit-learn's, started from the PCA, perplexity 30 or a third of the tokens.
    tokens: number of tokens, at most.
    per_sequence: tokens of a sequence, at most, drawn from its real ones.
    at: states, 0 for the embedding to L for what leaves the last layer; all by default.
    seed: of the draw, and of t-SNE.

  Returns:
    'points' [len(at), N, 2] float64; the sign of each PCA axis is the one that turns least from the state before.
    'sequence', 'position' [N]: where each token is in the sample. Of a model of text 'token' [N], its id, and
    'frequency' [N], the share of the real tokens that were read that have this id.
    'explained' [len(at), 2], with PCA alone: share of the variance along each axis.

  Raises:
    UserError: an unknown method, a state that does not exist or is not finite, fewer than three tokens, or t-SNE
      without scikit-learn.
  """
  L = config.num_layers
  at = range(L + 1) if at is None else at
  if method not in METHODS:
    raise UserError(f"method is {method!r}; it is one of {', '.join(METHODS)}.")
  if not all(0 <= i <= L for i in at):
    raise UserError(f'states to project are 0..{L}, got {sorted(at)}.')
  maker = tsne() if method == 'tsne' else None
  states, where = _drawn(config, params, batches, tokens, per_sequence, tuple(at), seed)
  N = states.shape[1]
  if N < LEAST:
    raise UserError(f'a projection needs {LEAST} real tokens or more, the sample has {N}.')
  points, explained = map(np.stack, zip(*map(pca, states)))
  if maker:
    fit = lambda x: maker(perplexity=min(30, (N - 1) / 3), init='pca', random_state=seed).fit_transform(x)
    return {'points': np.stack([fit(x) for x in states]).astype(np.float64), **where}
  for before, after in zip(points, points[1:]):
    after *= np.where(np.sum(before * after, axis=0) < 0, -1, 1)
  return {'points': points, 'explained': explained, **where}


def pca(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """x [N, D] -> (the first two principal components of each row [N, 2], their shares of the variance [2])."""
  x = x - x.mean(axis=0)
  u, s, _ = np.linalg.svd(np.pad(x, [(0, 0), (0, max(0, 2 - x.shape[1]))]), full_matrices=False)
  return u[:, :2] * s[:2], np.square(s[:2]) / max(np.sum(np.square(s)), np.finfo(float).tiny)


def tsne() -> type:
  """scikit-learn's TSNE. Raises UserError without scikit-learn."""
  try:
    from sklearn.manifold import TSNE
  except ImportError:
    raise UserError("t-SNE needs scikit-learn: pip install 'lns_jax[tsne]'.") from None
  return TSNE


@functools.partial(jax.jit, static_argnums=(0, 3))
def _states(config: ModelConfig, params, batch, at: tuple[int, ...]):
  states, mask_BT, bad = finite.states(config, params, batch)
  return states[np.array(at)], mask_BT, bad


def _drawn(config: ModelConfig, params, batches, tokens: int, per_sequence: int, at: tuple[int, ...], seed: int):
  """(states [len(at), N, D] float64, {'sequence', 'position', 'token', 'frequency': [N]})."""
  rng, start, number = np.random.default_rng(seed), 0, 0
  states, where = [np.zeros((len(at), 0, config.d_model))], [np.zeros((2, 0), int)]
  ids, counts = [], np.zeros(config.vocab_size, int)
  for batch in batches:
    batch = {k: batch[k] for k in INPUTS if k in batch}
    found, mask, bad = jax.device_get(_states(config, params, batch, at))
    finite.check(config, params, bad, start)
    if 'tokens' in batch:
      counts += np.bincount(np.asarray(batch['tokens'])[mask > 0], minlength=config.vocab_size)
    for row, real in enumerate(mask > 0):
      some = np.sort(rng.permutation(np.flatnonzero(real))[:min(per_sequence, tokens - number)])
      number += len(some)
      states.append(found[:, row, some].astype(np.float64))
      where.append(np.stack([np.full(len(some), start + row), some]))
      if 'tokens' in batch:
        ids.append(np.asarray(batch['tokens'])[row, some])
    start += len(mask)
    if number >= tokens:
      break
  sequence, position = np.concatenate(where, axis=1)
  found = {'sequence': sequence, 'position': position}
  if ids:
    token = np.concatenate(ids)
    found |= {'token': token, 'frequency': counts[token] / counts.sum()}
  return np.concatenate(states, axis=1), found
