"""Optax optimizer and schedule from settings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lns_jax.config import ModelConfig, OptimizerConfig
from lns_jax.layers import completep, schemes
from lns_jax.models import layout


def schedule(settings: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate by update count, 0-based: update 0 has rate 0 when there is a warm-up, as the authors' code.

  After the last step the rate stays at the final value. A warm-up as long as the run is a pure warm-up.
  """
  peak, warmup = settings.lr, settings.warmup_steps
  final, rest = peak * settings.final_lr_ratio, steps - warmup
  if settings.schedule == 'constant' or rest == 0:
    after = optax.constant_schedule(peak)
  elif settings.schedule == 'cosine':
    after = optax.cosine_decay_schedule(peak, rest, alpha=settings.final_lr_ratio)
  elif settings.schedule == 'linear':
    after = optax.linear_schedule(peak, final, rest)
  else:  # wsd: warm-up, stable, decay
    decay = min(rest, max(1, round(settings.decay_fraction * steps)))
    after = optax.linear_schedule(peak, final, decay, transition_begin=rest - decay)
  if not warmup:
    return after
  return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def groups(tree):
  """The group of every leaf: 'alpha' (learned factors), 'matrix' and 'vector' (inside blocks), 'outer' (outside).

  A vector is what has fewer than two dimensions in its own layer, whatever the layout, and every bias.
  """
  stacked = layout.is_stacked(tree['layers'])
  def group(path, leaf):
    names = [k.key for k in path]
    if names[-1] in schemes.LEARNED:
      return 'alpha'
    if names[0] != 'layers':
      return 'outer'
    return 'matrix' if is_matrix(names, leaf, stacked) else 'vector'
  return jax.tree_util.tree_map_with_path(group, tree)


def is_matrix(names: list[str], leaf, stacked: bool) -> bool:
  """Whether a leaf is a matrix, and neither a bias nor a ViT's positions."""
  return leaf.ndim - (stacked and names[0] == 'layers') >= 2 and not names[-1].endswith(('bias', 'positions'))


def matrices(tree):
  """True on every matrix, the embedding and the head included: what weight decay reaches."""
  stacked = layout.is_stacked(tree['layers'])
  return jax.tree_util.tree_map_with_path(lambda path, x: is_matrix([k.key for k in path], x, stacked), tree)


def multipliers(settings: OptimizerConfig, model: ModelConfig) -> dict[str, completep.Multipliers]:
  """What each group makes of the rate, epsilon and decay."""
  found = dict.fromkeys(('matrix', 'vector', 'outer', 'alpha'), completep.Multipliers())
  if schemes.has(model, 'completep'):
    found |= {group: completep.multipliers(group, model) for group in ('matrix', 'vector', 'outer')}
  return found | {'alpha': completep.Multipliers(lr=settings.alpha_lr_ratio)}


def make(settings: OptimizerConfig, steps: int, model: ModelConfig) -> optax.GradientTransformation:
  """clip (optional) -> Adam -> decay (adamw) -> multipliers of the groups -> learning rate."""
  by_group = multipliers(settings, model)
  def scale(field, power=1):
    """Multiplies by a group's multiplier; nothing at all when every one is 1."""
    factors = {g: getattr(m, field) ** power for g, m in by_group.items()}
    if set(factors.values()) == {1.0}:
      return []
    return [optax.stateless(lambda u, _: jax.tree.map(lambda x, g: x * factors[g], u, groups(u)))]
  # Adam of g / k with epsilon is Adam of g with k epsilon, exactly: both moments' roots scale with g.
  parts = [*clip(settings), *scale('eps', -1), optax.scale_by_adam(settings.b1, settings.b2, settings.eps)]
  if settings.weight_decay:
    parts.append(decay(settings, {g: m.decay for g, m in by_group.items()}))
  return optax.chain(*parts, *scale('lr'), optax.scale_by_learning_rate(schedule(settings, steps)))


def bounded(settings: OptimizerConfig, model: ModelConfig) -> bool:
  """Whether the settings alone say that a gradient whose squares have a finite sum makes a finite update.

  Such a gradient is below 2^64 in float32, and so is the bias-corrected mean that Adam divides by epsilon at least; of
  parameters, which decay adds, the same is taken. Clipping only shrinks.
  """
  f32, largest = np.float32, np.float32(2.0 ** 64)
  def update(m):
    mean = largest / (1 - f32(settings.b1))
    return f32(settings.lr * m.lr) * (mean / f32(settings.eps * m.eps) + f32(settings.weight_decay * m.decay) * largest)
  with np.errstate(all='ignore'):
    largest_updates = [update(m) for m in multipliers(settings, model).values()]
  return bool(np.isfinite(largest_updates).all() and f32(settings.b2) < 1)


def decay(settings: OptimizerConfig, by_group: dict[str, float]) -> optax.GradientTransformation:
  """Decoupled weight decay with a multiplier for each group."""
  everything = settings.decay == 'all'
  def update(updates, params):
    reached = jax.tree.map(lambda _: True, params) if everything else matrices(params)
    return jax.tree.map(lambda u, p, on, g: u + settings.weight_decay * by_group[g] * p if on else u,
                        updates, params, reached, groups(params))
  return optax.stateless(update)


def clip(settings: OptimizerConfig) -> list[optax.GradientTransformation]:
  """Clipping by the global norm, with learned factors as `alpha_clip` says."""
  if settings.alpha_clip == 'joint':
    return [optax.clip_by_global_norm(settings.clip_norm)] if settings.clip_norm else []
  own = (settings.alpha_clip_norm or settings.clip_norm) if settings.alpha_clip == 'apart' else 0.0
  def shrink(leaves, limit):
    norm = optax.tree_utils.tree_norm(leaves)
    return jnp.where(norm > limit, limit / norm, 1.0) if limit and leaves else 1.0
  def update(updates, _):
    of = groups(updates)
    leaves = lambda alpha: [x for x, g in zip(jax.tree.leaves(updates), jax.tree.leaves(of)) if (g == 'alpha') == alpha]
    factors = {True: shrink(leaves(True), own), False: shrink(leaves(False), settings.clip_norm)}
    return jax.tree.map(lambda x, g: x * factors[g == 'alpha'], updates, of)
  return [optax.stateless(update)]
