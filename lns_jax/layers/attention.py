"""Causal self-attention with rotary positions, grouped keys and a segment mask."""

import typing

import flax.linen as nn
import jax
import jax.numpy as jnp

from lns_jax import config as config_lib
from lns_jax.layers import param
from lns_jax.layers.norms import wide


class Context(typing.NamedTuple):
  """What every layer shares. `None` segments: one document a row; `None` step: a finished model."""

  segment_ids_BT: jax.Array | None
  cos_BTf: jax.Array  # f = head_dim / 2
  sin_BTf: jax.Array
  step: jax.Array | float | None = None  # finished updates, for factors that grow with them


def context(config: config_lib.ModelConfig, tokens_BT: jax.Array, segment_ids_BT: jax.Array | None,
            step: jax.Array | None = None) -> Context:
  """Rotary tables and mask ingredients; positions restart at every segment.

  step: finished updates while training; otherwise those of `config.ramp_step`.
  """
  if step is None and config.ramp_step >= 0:
    step = float(config.ramp_step)
  T, half = tokens_BT.shape[1], config.head_dim // 2
  positions = jnp.arange(T)[None]
  if segment_ids_BT is not None:
    starts = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    positions = positions - jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)
  dtype = jnp.promote_types(param.dtypes(config)[1], jnp.float32)
  frequencies = config.rope_base ** (-jnp.arange(half, dtype=dtype) / half)
  angles = positions[..., None].astype(dtype) * frequencies
  return Context(segment_ids_BT, jnp.cos(angles), jnp.sin(angles), step)


def rotate(x_BTHh: jax.Array, ctx: Context) -> jax.Array:
  """Rotary position embedding, half-split as Hugging Face has it: dimension i pairs with i + h/2."""
  x1, x2 = jnp.split(x_BTHh.astype(wide(x_BTHh)), 2, axis=-1)
  cos, sin = ctx.cos_BTf[:, :, None], ctx.sin_BTf[:, :, None]
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTHh.dtype)


def mask(ctx: Context, T: int) -> jax.Array:
  """[B or 1, T, T], True where a query (axis 1) may see a key (axis 2): its own past, its own document."""
  causal = jnp.tril(jnp.ones((T, T), bool))[None]
  if ctx.segment_ids_BT is None:
    return causal
  return causal & (ctx.segment_ids_BT[:, :, None] == ctx.segment_ids_BT[:, None, :])


def attend(q_BTHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, mask_BTS: jax.Array) -> jax.Array:
  """softmax(q k / sqrt(h)) v with H / K query heads a key head; softmax in float32. Returns [B, T, H, h]."""
  B, T, H, h = q_BTHh.shape
  K = k_BSKh.shape[2]
  precision = param.matmul_precision(q_BTHh.dtype)
  q_BTKGh = q_BTHh.reshape(B, T, K, H // K, h) * h ** -0.5
  scores = jnp.einsum('BTKGh,BSKh->BKGTS', q_BTKGh, k_BSKh, precision=precision,
                      preferred_element_type=wide(q_BTHh))
  scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(scores.dtype).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(q_BTHh.dtype)
  return jnp.einsum('BKGTS,BSKh->BTKGh', weights, v_BSKh, precision=precision).reshape(B, T, H, h)


class Attention(nn.Module):
  """f of the attention sub-layer: W_o concat(heads)."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, ctx: Context, layer: int) -> jax.Array:
    """layer: 1-based index, for depth-dependent initialisation. Returns [B, T, D]."""
    c = self.config
    D, H, K, h = c.d_model, c.num_heads, c.num_kv_heads, c.head_dim
    q = param.matrix(self, 'q', 'in', layer, (D, H, h), ('embed', 'heads', 'head_dim'), D)
    k = param.matrix(self, 'k', 'in', layer, (D, K, h), ('embed', 'kv_heads', 'head_dim'), D)
    v = param.matrix(self, 'v', 'value', layer, (D, K, h), ('embed', 'kv_heads', 'head_dim'), D)
    o = param.matrix(self, 'o', 'out', layer, (H, h, D), ('heads', 'head_dim', 'embed'), H * h)
    q_BTHh = rotate(param.dot('BTD,DHh->BTHh', x_BTD, q), ctx)
    k_BSKh = rotate(param.dot('BSD,DKh->BSKh', x_BTD, k), ctx)
    v_BSKh = param.dot('BSD,DKh->BSKh', x_BTD, v)
    heads_BTHh = attend(q_BTHh, k_BSKh, v_BSKh, mask(ctx, x_BTD.shape[1]))
    return param.dot('BTHh,HhD->BTD', heads_BTHh, o)
