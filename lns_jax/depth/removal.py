"""Loss rise when a layer is removed: all removals through one compiled program that reuses prefixes."""

import functools

import jax
import jax.numpy as jnp

from lns_jax.config import ModelConfig
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.depth.states import INPUTS
from lns_jax.errors import UserError
from lns_jax.layers import attention, block, schemes
from lns_jax.models import layout, transformer


def _one_layer(config: ModelConfig, params, ctx, run: layout.Run):
  """(i, x) -> x after the i-th layer of a run, i traced; the layer keeps its own index's factors."""
  stacked, k = params['layers'][layout.run_name(run)], transformer.run_factors(config, run)
  pick = lambda v, i: v if isinstance(v, float) else jnp.asarray(v)[i]
  def apply(i, x):
    p = jax.tree.map(lambda a: a[i], stacked)
    override = {sub: schemes.Factors(*(pick(getattr(k[sub], f), i) for f in schemes.FACTORS)) for sub in k}
    return block.Block(config).apply({'params': p}, x, ctx, run[0], override)[0]
  return apply


def _from(config: ModelConfig, params, ctx, x, first):
  """x through the layers first, first + 1, ... (0-based positions, traced)."""
  offset = 0
  for run in layout.runs(config):
    lower = jnp.clip(first - offset, 0, len(run))
    x = jax.lax.fori_loop(lower, len(run), _one_layer(config, params, ctx, run), x)
    offset += len(run)
  return x


def _prefixes(config: ModelConfig, params, ctx, x):
  """[L, B, T, D]: what enters each layer of the whole model."""
  entering, offset = jnp.zeros((config.num_layers, *x.shape), x.dtype), 0
  for run in layout.runs(config):
    one = _one_layer(config, params, ctx, run)
    def step(i, carry, one=one, offset=offset):
      x, entering = carry
      return one(i, x), entering.at[offset + i].set(x)
    x, entering = jax.lax.fori_loop(0, len(run), step, (x, entering))
    offset += len(run)
  return entering


@functools.partial(jax.jit, static_argnums=0)
def _losses(config: ModelConfig, params, batch):
  """(summed loss of each sequence [B], the same without each layer [B, L], weights [B])."""
  family = transformer.family(config)
  x = transformer.embed(config, params, transformer.inputs(config, batch))
  ctx = attention.context(config, x, batch.get('segment_ids'))
  def row_losses(x):
    return family.row_losses(config, params, transformer.final_norm(config, params, x), batch)
  entering = _prefixes(config, params, ctx, x)
  without = jax.lax.map(lambda i: row_losses(_from(config, params, ctx, entering[i], i + 1))[0],
                        jnp.arange(config.num_layers))
  whole, weights = row_losses(_from(config, params, ctx, x, jnp.int32(0)))
  return whole, without.T, weights


def layer_drop(config: ModelConfig, params, batches, *, seed: int = 0) -> dict[str, Estimate]:
  """Rise of the loss when each single layer is removed, without fine-tuning (paper section 2.1, Delta P by loss).

  Args:
    batches: as everywhere, with 'targets' [B, T], or 'labels' [B] beside images.

  Returns:
    'baseline' []: loss of the whole model, nats per token or image. 'layer_drop' [L]: loss without layer l minus the
    baseline; exactly 0 for a layer that does nothing.

  Raises:
    UserError: no batch, or a model with a single layer.
  """
  if config.num_layers < 2:
    raise UserError('a model with one layer has no layer to spare: removal needs two or more.')
  params = layout.stack(layout.unstack(params), config)
  baseline, rise = Mean(seed), Mean(seed)
  for batch in batches:
    batch = {k: batch[k] for k in (*INPUTS, 'targets', 'labels') if k in batch}
    whole, without, weight = jax.device_get(_losses(config, params, batch))
    baseline.add(whole, weight)
    rise.add(without - whole[:, None], weight)
  if not baseline.sequences:
    raise UserError('there are no batches to measure on.')
  return {'baseline': baseline.estimate(), 'layer_drop': rise.estimate()}
