"""A model's layers as functions of a traced position: what lets one compiled program try every change of depth."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lns_jax.config import ModelConfig
from lns_jax.layers import attention, block, schemes
from lns_jax.models import layout, loop

# (i, x [B, T, D]) -> the stream after the layer at position i (0-based, traced); each layer keeps its own index l.
Layer = Callable[[jax.Array, jax.Array], jax.Array]


def layer_at(config: ModelConfig, params, ctx: attention.Context,
             subs: tuple[str, ...] = schemes.SUBLAYERS) -> Layer:
  """The layer at a traced position; of `subs` see `Block`. params: stacked."""
  bodies, place = [], []  # one body for each run of layers that obey the same row
  for number, run in enumerate(layout.runs(config)):
    bodies.append(_layer_of(config, params['layers'][layout.run_name(run)], ctx, run, subs))
    place += [(number, i) for i in range(len(run))]
  if len(bodies) == 1:
    return bodies[0]
  number, within = map(jnp.asarray, zip(*place))
  return lambda i, x: jax.lax.switch(number[i], bodies, within[i], x)


def factors_at(config: ModelConfig, run: layout.Run) -> Callable[[jax.Array], dict[str, schemes.Factors]]:
  """The factors of the layer at a traced position in a run, as `Block` takes them."""
  k = loop.run_factors(config, run)
  pick = lambda v, i: v if isinstance(v, float) else jnp.asarray(v)[i]
  return lambda i: {sub: schemes.Factors(*(pick(getattr(k[sub], f), i) for f in schemes.FACTORS)) for sub in k}


def _layer_of(config: ModelConfig, stacked, ctx, run: layout.Run, subs) -> Layer:
  factors = factors_at(config, run)
  def apply(i, x):
    p = jax.tree.map(lambda a: a[i], stacked)
    return block.Block(config).apply({'params': p}, x, ctx, run[0], factors(i), subs)[0]
  return apply


def through(layer: Layer, x: jax.Array, first, last) -> jax.Array:
  """x through the layers at positions first, ..., last - 1 (traced)."""
  return jax.lax.fori_loop(first, last, layer, x)


def entering(layer: Layer, x: jax.Array, L: int) -> tuple[jax.Array, jax.Array]:
  """([L, B, T, D] what enters each layer, [B, T, D] what leaves the last)."""
  def step(x, i):
    return layer(i, x), x
  last, before = jax.lax.scan(step, x, jnp.arange(L))
  return before, last
