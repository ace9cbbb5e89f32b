"""Jacobians of the blocks and of the stack: how near a layer is to the identity (paper eq. 5, Theorem 3.3).

The Jacobian of a row of text over its n real tokens is [n D, n D]: what leaves at each of them against what enters at
each of them. It is never formed: everything here is made of products with it and with its transpose, in float32 or
wider, one block's intermediates in memory at a time. Of GPAS, whose backward pass is not the derivative of its forward
pass, these are the Jacobians that gradients see.
"""

import collections
import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import finite, walk
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.depth.spectral import Linear, bidiagonal, check_probes, enough, mean_over_probes, singular, squares
from lns_jax.depth.states import INPUTS, keys_of
from lns_jax.errors import UserError
from lns_jax.layers.norms import wide
from lns_jax.models import layout, transformer

ITERATIONS, PROBES = 20, 8


class Streams(typing.NamedTuple):
  """What enters each layer, before [L, B, T, D] in float32 or wider, and real [B, T, 1], whether a token counts."""

  layer: walk.Layer
  before: jax.Array
  real: jax.Array

  @classmethod
  def of(cls, config: ModelConfig, params, batch) -> 'Streams':
    """params: stacked."""
    config = dataclasses.replace(config, matmul='plain')  # rounding to 8 bits has no derivative to go forward by
    x, ctx = transformer.enter(config, params, transformer.inputs(config, batch), **transformer.placement(batch))
    x = x.astype(wide(x))  # the blocks compute in the type of their input
    layer = walk.layer_at(config, params, ctx)
    real = transformer.family(config).real_tokens(config, batch)[..., None] > 0
    return cls(layer, walk.entering(layer, x, config.num_layers)[0], real)

  def kept(self, v: jax.Array) -> jax.Array:
    """v [B, T, ...] without its padding."""
    return jnp.where(self.real, v, 0)

  def block(self, i: jax.Array) -> Linear:
    """The Jacobian of the layer at position i (traced)."""
    _, push = jax.linearize(lambda h: self.layer(i, h), self.before[i])
    pull = jax.linear_transpose(push, self.before[i])
    return Linear(lambda v: self.kept(push(self.kept(v))), lambda u: self.kept(pull(self.kept(u))[0]))

  def stack(self) -> Linear:
    """The Jacobian of all layers in turn, dy_L/dx_1; each product goes through the layers anew."""
    return Linear(self._push, lambda u: self.pulls(u, lambda v: None)[0])

  def _push(self, v: jax.Array) -> jax.Array:
    def one(v, at):
      return jax.jvp(functools.partial(self.layer, at[0]), (at[1],), (v,))[1], None
    return self.kept(jax.lax.scan(one, self.kept(v), self._places())[0])

  def pulls(self, u: jax.Array, read: Callable[[jax.Array], typing.Any]):
    """(u dy_L/dx_1, [L, ...] of what `read` keeps of u dy_L/dx_l for each l), in one backward pass."""
    def one(u, at):
      u = jax.vjp(functools.partial(self.layer, at[0]), at[1])[1](u)[0]
      return u, read(self.kept(u))
    u, kept = jax.lax.scan(one, self.kept(u), self._places(), reverse=True)
    return self.kept(u), kept

  def _places(self):
    return jnp.arange(len(self.before)), self.before


def numbered(batches):
  """(number of its first sequence in the whole sample, what a model reads of it) for each batch."""
  first = 0
  for batch in batches:
    batch = {k: batch[k] for k in (*INPUTS, 'weights') if k in batch}
    yield first, batch
    first += len(next(iter(batch.values())))


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _sizes(config: ModelConfig, params, batch, seed, first, iterations: int, probes: int) -> dict:
  """Squared norms [B, L]; 'entries' n D [B]; bidiagonal matrices: of J and J - I in 'blocks' [L, 2, B], 'stack' [B]."""
  s = Streams.of(config, params, batch)
  L, (B, *shape) = config.num_layers, s.before.shape[1:]
  keys, m = keys_of(seed, first, B), enough(probes, shape[0] * shape[1])
  start = s.kept(jax.vmap(lambda key: jax.random.normal(key, shape, s.before.dtype))(keys))
  flips = s.kept(jax.vmap(lambda key: jax.random.rademacher(key, shape, s.before.dtype))(keys))
  def of_block(i):
    J = s.block(i)
    def moved(z):
      u = J.push(z)
      return jnp.stack([squares(u), squares(u - z)])
    frobenius = mean_over_probes(moved, flips, m)
    of = jax.lax.map(lambda share: bidiagonal(J.less(share), start, iterations), jnp.arange(2, dtype=start.dtype))
    return of, {'frobenius': frobenius[0], 'distance': frobenius[1]}
  blocks, norms = jax.lax.map(of_block, jnp.arange(L))
  norms['suffix_frobenius'] = mean_over_probes(lambda z: s.pulls(z, squares)[1], flips, m)
  return {**{name: v.T for name, v in norms.items()}, 'entries': jnp.sum(s.real, axis=(1, 2)) * shape[1],
          'blocks': blocks, 'stack': bidiagonal(s.stack(), start, iterations)}


def _with_singular(found: dict) -> dict[str, np.ndarray]:
  """What `_sizes` found, with singular values in place of bidiagonal matrices: [B, ...] each."""
  blocks, stack = singular(found.pop('blocks')), singular(found.pop('stack'))
  by_row = lambda v, share: np.swapaxes(v[:, share], 0, 1)
  return found | {
      'spectral': by_row(blocks.largest, 0), 'distance_spectral': by_row(blocks.largest, 1),
      'spectral_residual': by_row(blocks.residual, 0), 'distance_spectral_residual': by_row(blocks.residual, 1),
      'spectrum': by_row(blocks.quantiles, 0), 'end_to_end': stack.largest, 'end_to_end_residual': stack.residual,
      'end_to_end_spectrum': stack.quantiles}


FROBENIUS = ('frobenius', 'distance', 'suffix_frobenius')


def _check(config: ModelConfig, params, found: dict[str, np.ndarray], first: int):
  of_layers = ~np.isfinite(found['frobenius'] + found['spectral'])
  of_stack = ~np.isfinite(found['suffix_frobenius'][:, 0] + found['end_to_end'])
  for row in np.flatnonzero((of_layers.any(axis=1) | of_stack) & (found['entries'] > 0)):
    finite.check_weights(params)
    layer = config.layer_ids[np.argmax(of_layers[row])]
    what = f'Jacobian of layer {layer}' if of_layers[row].any() else 'end-to-end Jacobian'
    raise UserError(f'the {what} is not finite in sequence {first + row}.')


def jacobian(config: ModelConfig, params, batches, *, iterations: int = ITERATIONS, probes: int = PROBES,
             seed: int = 0) -> dict[str, Estimate]:
  """Sizes of the Jacobian J of each block, and of the end-to-end one, through one compiled program.

  Frobenius norms are relative to that of the identity, sqrt(n D), all sequences' squares added up before the root:
  they are root mean squares over singular values. Spectral norms are means over sequences of each one's largest
  singular value. A row of several documents is one sequence; none of them acts on another.

  Args:
    iterations: of `spectral.bidiagonal`, two products each; the residuals say how far it came.
    probes: random vectors a sequence of the Frobenius norms, a power of two; exact where there are T D or more.
    seed: of the probes, the starts and the bootstrap.

  Returns:
    'spectral', 'distance_spectral' [L]: |J|_2 and |J - I|_2. '..._residual' [L] of both: see `spectral.singular`.
    'frobenius', 'distance' [L]: |J|_F and |J - I|_F over |I|_F; a layer that does nothing has 1 and exactly 0.
    'spectrum' [L, len(LEVELS)]: quantiles of the singular values of J at `spectral.LEVELS`, means over sequences.
    'end_to_end' []: |dy_L/dx_1|_2 (Theorem 3.3), y_L being what leaves the last layer. 'end_to_end_residual' [] and
    'end_to_end_spectrum' [len(LEVELS)]: as those of blocks.
    'suffix_frobenius' [L]: |dy_L/dx_l|_F over |I|_F, x_l being what enters layer l: the first is end to end.
    'spectral_product' []: the product of the blocks' |J|_2 of a sequence, which would bound its |dy_L/dx_1|_2 from
  above were each of them exact.
    The weight of norms is sequences, that of Frobenius norms is entries of the stream.

  Raises:
    UserError: no batch, no real token, a number of probes or iterations that cannot be, or a Jacobian that is not
    finite (naming the weight that is not, or layer and sequence).
  """
  check_probes(probes)
  if iterations < 1:
    raise UserError(f'iterations is {iterations}, but it must be 1 or more.')
  params, means = layout.stack(params, config), collections.defaultdict(lambda: Mean(seed))
  for first, batch in numbered(batches):
    found = _with_singular(jax.device_get(_sizes(config, params, batch, seed, first, iterations, probes)))
    _check(config, params, found, first)
    entries = found.pop('entries')
    found['spectral_product'] = np.prod(found['spectral'], axis=1)
    for name, values in found.items():
      means[name].add(values, entries if name in FROBENIUS else entries > 0)
  if not means:
    raise UserError('there are no batches to measure on.')
  if not means['spectral'].tokens:
    raise UserError('no valid tokens: every one is padding.')
  return {name: mean.estimate(np.sqrt if name in FROBENIUS else lambda each: each) for name, mean in means.items()}
