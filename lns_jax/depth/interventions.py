"""Changes of depth and what they cost: every one through one compiled program that reuses the prefix before it."""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import finite, walk
from lns_jax.depth.estimate import Mean
from lns_jax.depth.states import INPUTS, keys_of
from lns_jax.errors import UserError
from lns_jax.layers import param
from lns_jax.layers.norms import wide
from lns_jax.models import layout, transformer

# (logits, batch) -> (summed score [G], weight [G]) of the G groups of a batch that an interval resamples: its rows, or
# questions that several rows ask. Traced; higher is better or worse as the score has it. None stands for the loss.
ScoreFn = Callable[[jax.Array, dict], tuple[jax.Array, jax.Array]]

KINDS = ('skip', 'attn', 'mlp', 'scale', 'noise', 'swap', 'linear')


class Plan(typing.NamedTuple):
  """N interventions, arrays [N]: what enters position `at` is changed by `kind`, and goes on at position `resume`.

  kind: position in KINDS. 'skip': nothing between `at` and `resume` is applied. 'attn', 'mlp': of the layer at `at`
    that sub-layer alone is. 'scale': what the layer adds times `amount`. 'noise': plus Gaussian noise whose norm is
    `amount` of what the layer adds, token by token. 'swap': the layer and the next in the other order.
    'linear': the layer is replaced by a linear map.
  """

  kind: np.ndarray
  at: np.ndarray
  amount: np.ndarray
  resume: np.ndarray

  @classmethod
  def of(cls, kind: str, at, resume, amount=0.0) -> 'Plan':
    """Interventions of one kind; arguments broadcast against `at`."""
    at = np.asarray(at, np.int32)
    full = lambda v, dtype: np.broadcast_to(np.asarray(v, dtype), at.shape)
    return cls(full(KINDS.index(kind), np.int32), at, full(amount, np.float32), full(resume, np.int32))

  def __add__(self, other: 'Plan') -> 'Plan':
    return Plan(*(np.concatenate(pair) for pair in zip(self, other)))


def _changes(whole: walk.Layer, parts: dict[str, walk.Layer], maps, keys_B) -> dict[str, Callable]:
  """Kind -> (at, amount, x) -> x."""
  def added(i, x):
    return (whole(i, x) - x).astype(wide(x))
  def scale(i, amount, x):
    return x + (amount * added(i, x)).astype(x.dtype)
  def noise(i, amount, x):
    delta = added(i, x)
    draw = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, i), x.shape[1:], delta.dtype))(keys_B)
    size = amount * jnp.linalg.norm(delta, axis=-1, keepdims=True) / jnp.linalg.norm(draw, axis=-1, keepdims=True)
    return x + (delta + size * draw).astype(x.dtype)
  def linear(i, amount, x):
    slope, intercept = maps[0][i], maps[1][i]
    return x + (param.dot('BTD,DE->BTE', x.astype(wide(x)), slope) + intercept).astype(x.dtype)
  return {
      'skip': lambda i, amount, x: x,
      'attn': lambda i, amount, x: parts['attn'](i, x),
      'mlp': lambda i, amount, x: parts['mlp'](i, x),
      'scale': scale,
      'noise': noise,
      'swap': lambda i, amount, x: whole(i, whole(i + 1, x)),
      'linear': linear,
  }


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scores(config: ModelConfig, kinds: tuple[str, ...], score_fn: ScoreFn | None, params, batch, plan: Plan, removed,
            maps, seed, first):
  """(scores of each intervention [N, G], their weights [N, G]); plan.kind: position in `kinds`.

  first: number of the batch's first row in the whole sample, which its noise belongs to.
  """
  x, ctx = transformer.enter(config, params, transformer.inputs(config, batch), **transformer.placement(batch))
  def kept(layer):
    return lambda i, x: jax.lax.cond(removed[i], lambda i, x: x, layer, i, x)
  whole = kept(walk.layer_at(config, params, ctx))
  parts = {sub: kept(walk.layer_at(config, params, ctx, (sub,))) for sub in ('attn', 'mlp')}
  before, last = walk.entering(whole, x, config.num_layers)
  states = jnp.concatenate([before, last[None]])
  known = _changes(whole, parts, maps, keys_of(seed, first, len(x)))
  changes = [known[kind] for kind in kinds]
  def score(x):
    if score_fn is None:
      return transformer.family(config).row_losses(config, params, transformer.final_norm(config, params, x), batch)
    return score_fn(transformer.head(config, params, x), batch)
  def intervened(one: Plan):
    x = jax.lax.switch(one.kind, changes, one.at, one.amount, states[one.at])
    return score(walk.through(whole, x, one.resume, config.num_layers))
  return jax.lax.map(intervened, plan)


def run(config: ModelConfig, params, batches, plan: Plan, *, removed=(), maps=None, score_fn: ScoreFn | None = None,
        seed: int = 0) -> tuple[Mean, Mean]:
  """(score of the model, score of each intervention minus it [N]), per token or per unit of `score_fn`'s weight.

  Args:
    batches: as everywhere, with 'targets' [B, T], or 'labels' [B] beside images, and what `score_fn` reads.
    removed: positions of layers that are left out throughout.
    maps: (slopes [L, D, D], intercepts [L, D]) of what 'linear' adds in place of a layer.
    seed: of the bootstrap and of the noise.

  Raises:
    UserError: no batch, nothing in them that is scored, a layer that does not exist, or a score that is not finite
      without any intervention.
  """
  L = config.num_layers
  if not all(0 <= i < L for i in removed):
    raise UserError(f'positions of removed layers are 0..{L - 1}, got {sorted(removed)}.')
  mask = np.isin(np.arange(L), list(removed))
  # The model itself is an intervention behind its last layer: a change of nothing then costs exactly 0, which two
  # programs, rounded apart, would not give.
  plan = Plan.of('skip', [L], L) + plan
  used, kind = np.unique(plan.kind, return_inverse=True)  # only these are compiled
  kinds, plan = tuple(KINDS[k] for k in used), plan._replace(kind=kind.astype(np.int32))
  params = layout.stack(params, config)
  baseline, change, first = Mean(seed), Mean(seed), 0
  for batch in batches:
    if score_fn is None:
      batch = {k: batch[k] for k in (*INPUTS, 'targets', 'labels') if k in batch}
    (whole, *changed), (weight, *_) = jax.device_get(
        _scores(config, kinds, score_fn, params, batch, plan, mask, maps, seed, first))
    if not np.all(np.isfinite(whole)):
      finite.check_weights(params)
      raise UserError(f'the score of the whole model is not finite at sequence '
                      f'{baseline.sequences + int(np.argmin(np.isfinite(whole)))}.')
    baseline.add(whole, weight)
    change.add(np.stack([v - whole for v in changed], axis=1), weight)
    first += len(next(iter(batch.values())))
  if not baseline.sequences:
    raise UserError('there are no batches to measure on.')
  if not baseline.tokens:
    raise UserError('there is nothing to score: every target is padding or masked.')
  return baseline, change
