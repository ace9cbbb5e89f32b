"""Optax optimizer and schedule from settings."""

import optax

from lns_jax.config import OptimizerConfig
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


def is_matrix(params):
  """True where a leaf has two or more dimensions in its own layer, whatever the layout: what weight decay reaches."""
  def mark(tree, stacked):
    return {name: mark(v, stacked or (name == 'layers' and layout.is_stacked(v))) if isinstance(v, dict)
            else v.ndim - stacked >= 2 for name, v in tree.items()}
  return mark(params, False)


def make(settings: OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """clip (optional) -> Adam -> decay of matrices (adamw) -> learning rate."""
  parts = []
  if settings.clip_norm:
    parts.append(optax.clip_by_global_norm(settings.clip_norm))
  parts.append(optax.scale_by_adam(settings.b1, settings.b2, settings.eps))
  if settings.weight_decay:
    parts.append(optax.add_decayed_weights(settings.weight_decay, mask=is_matrix))
  return optax.chain(*parts, optax.scale_by_learning_rate(schedule(settings, steps)))
