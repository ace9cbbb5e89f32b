"""Norms and singular values of linear maps that are known by their products alone."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.errors import UserError

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


class Linear(typing.NamedTuple):
  """A linear map of [B, T, D], each row of B by itself, as products with it (push) and with its transpose (pull)."""

  push: Callable[[jax.Array], jax.Array]
  pull: Callable[[jax.Array], jax.Array]

  def less(self, share: jax.Array) -> 'Linear':
    """The map minus `share` times the identity."""
    return Linear(lambda v: self.push(v) - share * v, lambda u: self.pull(u) - share * u)


def squares(v: jax.Array) -> jax.Array:
  """[B, T, D] -> sum of squares of each row, [B]."""
  return jnp.sum(jnp.square(v), axis=(1, 2))


class Bidiagonal(typing.NamedTuple):
  """Of each row's map the k entries on the diagonal and the k above it, the last of them outside: [..., k]."""

  diagonal: jax.Array
  above: jax.Array


class Singular(typing.NamedTuple):
  """Of each row's singular values: the largest [...], its residual [...], quantiles at LEVELS [..., len(LEVELS)]."""

  largest: np.ndarray
  residual: np.ndarray
  quantiles: np.ndarray


def bidiagonal(of: Linear, start: jax.Array, iterations: int) -> Bidiagonal:
  """Golub-Kahan-Lanczos bidiagonalisation of each row's map [B, iterations], one push and one pull an iteration.

  This is power iteration on J^T J that keeps the lengths it meets: for the same products it sees the largest singular
  value on all of the Krylov space instead of on its last vector. Nothing is orthogonalised again, so that memory does
  not grow with iterations; that repeats singular values, but makes none.

  Args:
    start: [B, T, D], Gaussian: a vector at right angles to the largest direction would never find it.
  """
  size = lambda v: jnp.sqrt(squares(v))[:, None, None]
  over = lambda v, s: v / jnp.where(s > 0, s, 1)
  def iterate(carry, _):
    v, u, beta = carry
    u = of.push(v) - beta * u
    alpha = size(u)
    u = over(u, alpha)
    v = of.pull(u) - alpha * v
    beta = size(v)
    return (over(v, beta), u, beta), (alpha[:, 0, 0], beta[:, 0, 0])
  first = (over(start, size(start)), jnp.zeros_like(start), jnp.zeros_like(start[:, :1, :1]))
  _, (alphas, betas) = jax.lax.scan(iterate, first, length=iterations)
  return Bidiagonal(alphas.T, betas.T)


def singular(found: Bidiagonal) -> Singular:
  """Singular values of the maps behind bidiagonal matrices; NaN for one that is not finite.

  On the host, in float64: these matrices are small, and jaxlib's own SVD of a batch of them, on several CPU devices
  at once, waits forever for threads that wait as well.

  Returns:
    largest: a lower bound in exact arithmetic. residual: of its singular vectors, relative; a true singular value is
    within this share of `largest`, and once it is small the error is of its square.
    quantiles: of all n D singular values, by Gauss quadrature (stochastic Lanczos, Ubaru et al. 2017): right to the
    distance between neighbouring nodes, of which there are `iterations`. Rounding of the products, amplified, moves
    quantiles and residuals by percents.
  """
  diagonal, above = (np.asarray(v, np.float64) for v in found)
  sound = np.isfinite(diagonal + above).all(axis=-1, keepdims=True)
  diagonal, above = np.where(sound, diagonal, 0), np.where(sound, above, 0)
  k = diagonal.shape[-1]
  left, values, right = np.linalg.svd(np.eye(k) * diagonal[..., None] + np.eye(k, k=1) * above[..., None])
  largest = values[..., 0]
  residual = above[..., -1] * np.abs(left[..., -1, 0]) / np.where(largest > 0, largest, 1)
  below = np.cumsum(np.square(right[..., ::-1, 0]), axis=-1)
  at = np.sum(below[..., None] < np.array(LEVELS), axis=-2)
  quantiles = np.take_along_axis(values[..., ::-1], np.minimum(at, k - 1), axis=-1)
  blank = lambda v: np.where(sound if v.ndim == sound.ndim else sound[..., 0], v, np.nan)
  return Singular(*map(blank, (largest, residual, quantiles)))


def enough(probes: int, n: int) -> int:
  """The number of probes that is used: no more than make a mean over probes of vectors of n numbers exact."""
  return min(probes, 1 << (n - 1).bit_length())


def mean_over_probes(function: Callable[[jax.Array], jax.Array], flips: jax.Array, m: int) -> jax.Array:
  """Mean of a function of m random sign vectors z, of which m = 2^k; E[z z^T] = I.

  The signs are rows of a Hadamard matrix of order m, its columns repeated, each entry of the vector flipped at random
  (Hutchinson's estimator with fewer accidents): of the products z_i z_j with i != j all those cancel whose i and j
  differ modulo m. With m >= n numbers in a vector that is all of them, and the mean of a quadratic form is exact.

  Args:
    flips: [B, ...], random signs; the function gets the like. m: number of probes.
  """
  column = jnp.arange(flips[0].size).reshape(flips.shape[1:]) % m
  def probe(k):
    odd = jax.lax.population_count(column & k) % 2
    return function(flips * (1 - 2 * odd).astype(flips.dtype))
  return jnp.mean(jax.lax.map(probe, jnp.arange(m)), axis=0)


def check_probes(probes: int):
  """Refuses a number of probes that no Hadamard matrix of this kind has."""
  if probes < 1 or probes & (probes - 1):
    near = sorted({1 << max(probes, 1).bit_length() - 1, 1 << max(probes, 1).bit_length()})
    raise UserError(f"probes is {probes}, but must be a power of two, such as {' or '.join(map(str, near))}.")
