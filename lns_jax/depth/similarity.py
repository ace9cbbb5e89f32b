"""Linear CKA between all states of the residual stream, from mini-batches of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import finite
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.depth.states import INPUTS, counted
from lns_jax.errors import UserError
from lns_jax.layers.norms import wide
from lns_jax.models import transformer

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


def _dealt(v: jax.Array, axis: int, parts: int) -> jax.Array:
  """An axis dealt like cards into `parts` equal hands, filled up with zeros: [..., N, ...] -> [..., n, parts, ...]."""
  N = v.shape[axis]
  v = jnp.pad(v, [(0, -N % parts if a == axis else 0) for a in range(v.ndim)])
  return v.reshape(*v.shape[:axis], -1, parts, *v.shape[axis + 1:])


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _sums(config: ModelConfig, params, batch, size: int, together: int):
  """(HSIC_1 times tokens [G, S, S], tokens [G]) of the groups of rows of a batch, `finite.first_bad` [B, S]."""
  mask_BT = counted(config, batch, 'all', True)
  states = transformer.states(config, params, transformer.inputs(config, batch), segment_ids=batch.get('segment_ids'))
  bad = finite.first_bad(states, mask_BT)
  S, B, T, D = states.shape
  G = -(-B // together)
  M = -(-(-(-B // G) * T) // size)
  def minibatches(v, axis):  # [..., B, T, ...] -> [G * M, ..., n, ...]
    v = _dealt(v, axis, G)
    v = jnp.moveaxis(v, axis + 1, 0)
    v = v.reshape(*v.shape[:axis + 1], -1, *v.shape[axis + 3:])
    v = jnp.moveaxis(_dealt(v, axis + 1, M), axis + 2, 1)
    return v.reshape(G * M, *v.shape[2:])
  def one(part):
    x_SND, mask_N = part
    found, defined = hsic(x_SND, mask_N)
    n = defined * jnp.sum(mask_N)
    return n * found, n
  found, n = jax.lax.map(one, (minibatches(states, 1), minibatches(mask_BT, 0)))
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
      Of a batch every G-th one, G = ceil(B / together). They are what the interval resamples; a sample of `together`
      or fewer sequences has none to speak of.

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
