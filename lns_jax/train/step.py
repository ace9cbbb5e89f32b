"""One optimizer update as one jitted function with donated state."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lns_jax import sharding
from lns_jax.config import ModelConfig, RunConfig
from lns_jax.layers.norms import wide
from lns_jax.models import transformer
from lns_jax.models import loss as loss_lib
from lns_jax.train import optimizer as optimizer_lib
from lns_jax.train import stats


class TrainState(typing.NamedTuple):
  """All that a step changes. `step` counts finished updates."""

  params: typing.Any
  opt_state: typing.Any
  step: jax.Array


def loss_sums(config: ModelConfig, params, batch, *, with_stats: bool = False, chunk: int = 0, step=None):
  """Summed loss, its weight, and summed per-layer statistics of one (micro-)batch.

  batch: 'tokens', 'targets', 'segment_ids' int32 [B, T], optionally 'weights' float32 [B, T]; or 'images' [B, S, S, C],
    'labels' int32 [B], optionally 'weights' float32 [B].
  chunk: positions whose logits exist at a time, see `models.loss.summed_loss`.
  step: finished updates, for factors that grow with them.
  """
  family = transformer.family(config)
  read = stats.read if with_stats else lambda out: {}
  normed_BTD, kept = transformer.before_head(config, params, batch, read, step)
  total, weight = family.summed_loss(config, params, normed_BTD, batch, chunk)
  return total, (weight, stats.sums(kept, family.real_tokens(config, batch)) if with_stats else {})


def accumulate(config: ModelConfig, params, batch, parts: int, **kwargs):
  """(gradient of the summed loss, loss sum, weight, statistic sums) over `parts` micro-batches.

  Sums, so that a token weighs the same in whatever micro-batch it lies. kwargs: of `loss_sums`.
  """
  gradient = jax.value_and_grad(lambda p, b: loss_sums(config, p, b, **kwargs), has_aux=True)
  def one(micro):
    (total, (weight, sums)), grads = gradient(params, micro)
    return jax.tree.map(lambda g: g.astype(wide(g)), grads), total, weight, sums
  if parts == 1:
    return one(batch)
  # Row r goes to micro-batch r mod parts: every device keeps its own rows.
  micro = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
  first = one(jax.tree.map(lambda x: x[0], micro))
  rest = jax.tree.map(lambda x: x[1:], micro)
  return jax.lax.scan(lambda acc, m: (jax.tree.map(jnp.add, acc, one(m)), None), first, rest)[0]


def make_train_step(config: RunConfig, steps: int) -> Callable:
  """(state, batch) -> (state, metrics).

  metrics: 'loss' (nats per token or image), 'tokens' (weight: tokens, or images), 'grad_norm' (before clipping),
  'lr' (that of this update), and with layer statistics 'variance' [L+1], 'attn_ratio', 'mlp_ratio', 'layer_grad_norm'
  and 'layer_decrease' [L], 'predicted_decrease' (see `stats`). 'finite' says whether loss, gradient and update are.
  A non-finite step leaves the state as it was, so that it can still be saved and examined.
  """
  tx = optimizer_lib.make(config.optimizer, steps, config.model)
  rate = optimizer_lib.schedule(config.optimizer, steps)
  with_stats = config.train.layer_stats_every > 0
  # Else all updates have to be known before the first parameter is written: a pass more over the state.
  bounded = optimizer_lib.bounded(config.optimizer, config.model)

  def step(state: TrainState, batch):
    grads, total, weight, sums = accumulate(
        config.model, state.params, batch, config.train.accumulation, with_stats=with_stats,
        chunk=config.train.loss_chunk, step=state.step)
    grads = jax.tree.map(lambda g: g / jnp.maximum(weight, 1).astype(g.dtype), grads)
    squares = stats.squares(grads)
    metrics = {'loss': loss_lib.mean(total, weight), 'tokens': weight, 'grad_norm': jnp.sqrt(squares['all']),
               'lr': rate(state.step)}
    if with_stats:
      metrics |= stats.finish(sums) | {'layer_grad_norm': jnp.sqrt(squares['layers'])}
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    if with_stats:
      decrease = stats.decrease(grads, updates)
      metrics |= {'layer_decrease': decrease['layers'], 'predicted_decrease': decrease['all']}
    new = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
    good = jnp.isfinite(total) & jnp.isfinite(squares['all'])
    if not bounded:  # a finite gradient times an absurd rate must not reach a checkpoint
      good &= jnp.isfinite(optax.tree_utils.tree_norm(updates))
    metrics['finite'] = good
    return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, state), metrics

  return step


def init_state(config: RunConfig, steps: int, batch=None) -> TrainState:
  """A fresh state; jit it with out_shardings, so that it is born sharded. batch: see `transformer.init`."""
  return state_of(config, steps, transformer.init(config.model, jax.random.key(config.train.seed), batch))


def shapes(config: RunConfig, steps: int) -> TrainState:
  """Shapes and types of a state."""
  return jax.eval_shape(lambda: state_of(config, steps, transformer.unprofiled(config.model, jax.random.key(0))))


def state_of(config: RunConfig, steps: int, params) -> TrainState:
  """The state before the first update of these parameters."""
  opt_state = optimizer_lib.make(config.optimizer, steps, config.model).init(params)
  return TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def state_shardings(mesh, config: RunConfig, steps: int) -> TrainState:
  """A sharding for every leaf of the state; optimizer moments lie as their parameters."""
  tx = optimizer_lib.make(config.optimizer, steps, config.model)
  of_params, everywhere = sharding.params(mesh, config.model), sharding.replicated(mesh)
  of_opt = optax.tree_utils.tree_map_params(
      tx, lambda _, s: s, shapes(config, steps).opt_state, of_params, transform_non_params=lambda _: everywhere)
  return TrainState(of_params, of_opt, everywhere)
