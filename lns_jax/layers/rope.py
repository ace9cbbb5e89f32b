"""Rotary position embedding: the frequencies of a head, and how they are scaled for texts longer than in training.

Each kind computes what Hugging Face's transformers computes for the same config.json (`rope_scaling`).
"""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

# Kinds whose frequencies change once a text is longer than `original_length`: keys computed before are then stale.
BY_LENGTH = ('dynamic', 'longrope')


class Rotation(typing.NamedTuple):
  """Angles of a position are `frequencies` times it; cosines and sines are multiplied by `factor`."""

  frequencies: jax.Array | np.ndarray  # [f] or, where they depend on a row's length, [B, 1, f]; f = head_dim / 2
  factor: float = 1.0


def rotation(base: float, half: int, scaling, dtype, length_B1: jax.Array) -> Rotation:
  """The rotation of heads of width 2 * half.

  Args:
    base: of the frequencies base^(-i / half).
    scaling: a `config.RopeScaling`.
    dtype: float32 or wider.
    length_B1: [B, 1] positions of each row's longest text, read by the kinds of `BY_LENGTH` alone.
  """
  if scaling.kind == 'none':
    return Rotation(base ** (-jnp.arange(half, dtype=dtype) / half))
  if scaling.kind == 'dynamic':
    return Rotation(_dynamic(base, half, scaling, dtype, length_B1))
  plain = float(base) ** (-np.arange(half) / half)
  if scaling.kind == 'linear':
    return Rotation(jnp.asarray(plain / scaling.factor, dtype))
  if scaling.kind == 'yarn':
    return Rotation(jnp.asarray(_yarn(plain, base, scaling), dtype), _yarn_factor(scaling))
  if scaling.kind == 'llama3':
    return Rotation(jnp.asarray(_llama3(plain, scaling), dtype))
  short, long = (jnp.asarray(plain / np.array(f), dtype) for f in (scaling.short_factor, scaling.long_factor))
  return Rotation(jnp.where((length_B1 > scaling.original_length)[..., None], long, short), _long_factor(scaling))


def _dynamic(base: float, half: int, scaling, dtype, length_B1: jax.Array) -> jax.Array:
  """NTK scaling by the length of the text: the base grows with it, beyond `original_length`."""
  length = jnp.maximum(length_B1, scaling.original_length).astype(dtype)[..., None]
  growth = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
  return (base * growth ** (half / (half - 1))) ** (-jnp.arange(half, dtype=dtype) / half)


def _yarn(plain: np.ndarray, base: float, scaling) -> np.ndarray:
  """YaRN (arXiv 2309.00071): fast rotations as they are, slow ones slower by `factor`, a ramp between."""
  half = len(plain)
  def dimension(rotations: float) -> float:
    return half * math.log(scaling.original_length / (rotations * 2 * math.pi)) / math.log(base)
  low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * half - 1)
  ramp = np.clip((np.arange(half) - low) / (high - low or 1e-3), 0, 1)
  return plain / scaling.factor * ramp + plain * (1 - ramp)


def _yarn_factor(scaling) -> float:
  if scaling.attention_factor:
    return scaling.attention_factor
  def mscale(weight: float) -> float:
    return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0
  if scaling.mscale and scaling.mscale_all_dim:
    return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
  return mscale(1.0)


def _llama3(plain: np.ndarray, scaling) -> np.ndarray:
  """Llama 3.1: wavelengths beyond original_length / low_freq_factor are stretched by `factor`, a ramp below."""
  turns = scaling.original_length * plain / (2 * math.pi)  # of the original length
  smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
  smooth = np.clip(smooth, 0, 1)
  return (1 - smooth) * plain / scaling.factor + smooth * plain


def _long_factor(scaling) -> float:
  if scaling.attention_factor:
    return scaling.attention_factor
  if scaling.factor <= 1:
    return 1.0
  return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length))
