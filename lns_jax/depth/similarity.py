"""Linear CKA between all states of the residual stream, from mini-batches of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import finite
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.depth.states import INPUTS
from lns_jax.errors import UserError
from lns_jax.layers.norms import wide

LEAST = 4  # tokens below which HSIC_1 is not defined


def hsic(x_SND: jax.Array, mask_N: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(HSIC_1 of all pairs of S linear kernels [S, S], 1 or 0 as it is defined) on the tokens of the mask.

  The unbiased estimator of Song et al. (JMLR 2012), as Nguyen et al. (arXiv 2010.15327) use it, in float32 or wider.
  Not defined, and 0, for fewer than four tokens. mask: 0 or 1.
  """
  x_SND, w = x_SND.astype(wide(x_SND)), mask_N.astype(wide(x_SND))
  n = jnp.sum(w)
  real = w[:, None] > 0
  # The estimate does not feel a shift, float32 would.
  centre = jnp.sum(jnp.where(real, x_SND, 0), axis=1, keepdims=True) / jnp.maximum(n, 1)
  x_SND = jnp.where(real, x_SND - centre, 0)
  dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
  k = dot('snd,smd->snm', x_SND, x_SND) * (1 - jnp.eye(len(w), dtype=w.dtype))
  rows = jnp.sum(k, axis=-1)
  total = jnp.sum(rows, axis=-1)
  defined = n >= LEAST
  n = jnp.maximum(n, LEAST)
  found = (dot('snm,tnm->st', k, k) + jnp.outer(total, total) / ((n - 1) * (n - 2))
           - 2 / (n - 2) * dot('sn,tn->st', rows, rows)) / (n * (n - 3))
  return jnp.where(defined, found, 0), defined.astype(w.dtype)


def _slots(mask_BT: jax.Array, size: int, together: int) -> tuple[jax.Array, int, int]:
  """(where each token goes in [G, M, size], flat [B, T]; G groups of rows; M mini-batches of a group).

  Rows are dealt to groups like cards, and a group's tokens to its mini-batches: those alone that are real, so that
  padding changes nothing. Padding goes to G * M * size.
  """
  B, T = mask_BT.shape
  G, M = -(-B // together), -(-min(together, B) * T // size)
  real_BT = mask_BT > 0
  tokens_B = jnp.sum(real_BT, axis=1)
  number_B = jnp.cumsum(tokens_B > 0) - 1
  group_B = number_B % jnp.maximum(-(-(number_B[-1] + 1) // together), 1)
  same_BB = group_B[:, None] == group_B
  before_B = jnp.sum(jnp.tril(same_BB, -1) * tokens_B, axis=1)
  hands_B = jnp.maximum(-(-jnp.sum(same_BB * tokens_B, axis=1) // size), 1)[:, None]
  rank_BT = before_B[:, None] + jnp.cumsum(real_BT, axis=1) - 1
  place_BT = (group_B[:, None] * M + rank_BT % hands_B) * size + rank_BT // hands_B
  return jnp.where(real_BT, place_BT, G * M * size), G, M


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _sums(config: ModelConfig, params, batch, size: int, together: int):
  """(HSIC_1 times tokens [G, S, S], tokens [G]) of the groups of rows of a batch, `finite.first_bad` [B, S]."""
  states, mask_BT, bad = finite.states(config, params, batch)
  S, D = states.shape[0], states.shape[-1]
  place_BT, G, M = _slots(mask_BT, size, together)
  place_N = place_BT.reshape(-1)
  x = jnp.zeros((S, G * M * size, D), states.dtype).at[:, place_N].set(states.reshape(S, -1, D), mode='drop')
  mask = jnp.zeros(G * M * size).at[place_N].set(1, mode='drop')
  def one(part):
    x_SND, mask_N = part
    found, defined = hsic(x_SND, mask_N)
    n = defined * jnp.sum(mask_N)
    return n * found, n
  found, n = jax.lax.map(one, (jnp.swapaxes(x.reshape(S, G * M, size, D), 0, 1), mask.reshape(G * M, size)))
  return jnp.sum(found.reshape(G, M, S, S), axis=1), jnp.sum(n.reshape(G, M), axis=1), bad


def cka(config: ModelConfig, params, batches, *, size: int = 256, together: int = 8,
        seed: int = 0) -> dict[str, Estimate]:
  """Linear CKA (Kornblith et al., arXiv 1905.00414) between all pairs of states, in one pass.

  HSIC_1(s, t) / sqrt(HSIC_1(s, s) HSIC_1(t, t)), each HSIC_1 a mean over mini-batches of tokens (Nguyen et al., arXiv
  2010.15327): unbiased however small they are, where the plain CKA of few tokens with many units is near 1. No turn,
  no scale and no shift of a state changes it. As an estimate it may leave [0, 1] a little; the diagonal is 1.

  Args:
    size: tokens of a mini-batch, at most.
    together: sequences whose tokens are mixed into the same mini-batches, so that these do not see one document each.
      Of a batch every G-th one, G = ceil(rows / together), rows of padding aside. They are what the interval resamples;
      a sample of `together` or fewer sequences has none to speak of.

  Returns 'cka' [L + 1, L + 1], the embedding first; NaN for a state that is the same for all tokens.

  Raises:
    UserError: no batch, no mini-batch of four real tokens, or a state that is not finite.
  """
  if size < LEAST or together < 1:
    raise UserError(f'CKA needs mini-batches of {LEAST} tokens or more of one sequence or more, got size {size} and '
                    f'together {together}.')
  mean = Mean(seed)
  sequences = 0
  for batch in batches:
    batch = {k: batch[k] for k in INPUTS if k in batch}
    found, tokens, bad = jax.device_get(_sums(config, params, batch, size, together))
    finite.check(config, params, bad, sequences)
    mean.add(found, tokens)
    sequences += len(bad)
  if not sequences:
    raise UserError('there are no batches to measure on.')
  if not mean.tokens:
    raise UserError(f'no mini-batch has {LEAST} real tokens: CKA has nothing to compare.')
  return {'cka': mean.estimate(_normalised)}


def _normalised(each: np.ndarray) -> np.ndarray:
  own = np.einsum('rss->rs', each)
  with np.errstate(invalid='ignore', divide='ignore'):
    size = np.sqrt(np.where(own > 0, own, np.nan))
    return each / (size[:, :, None] * size[:, None, :])
