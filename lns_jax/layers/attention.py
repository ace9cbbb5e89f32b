"""Self-attention with rotary positions or none, grouped keys, and a mask by document, past and window."""

import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import config as config_lib
from lns_jax.layers import param
from lns_jax.layers.norms import Norm, wide


class Context(typing.NamedTuple):
  """What every layer shares. `None` segments: one document a row; `None` step: a finished model."""

  segment_ids_BT: jax.Array | None
  cos_BTf: jax.Array | None  # f = head_dim / 2; None: positions are in the embedding
  sin_BTf: jax.Array | None
  step: jax.Array | float | None = None  # finished updates, for factors that grow with them
  windows_BT: jax.Array | None = None  # segments of the layers that see windows


def context(config: config_lib.ModelConfig, x_BT: jax.Array, segment_ids: jax.Array | None = None,
            step: jax.Array | None = None, *, positions: jax.Array | None = None,
            windows: jax.Array | None = None) -> Context:
  """Rotary tables and mask ingredients.

  x_BT: tokens or the stream [B, T, ...], of which only T is read.
  segment_ids: [B, T]; None: one document a row.
  step: finished updates while training; otherwise those of `config.ramp_step`.
  positions: [B, T, axes]; by default one axis, 0..T-1, which restarts at every segment.
  windows: [B, T], as segment_ids, for the layers that see windows.
  """
  if step is None and config.ramp_step >= 0:
    step = float(config.ramp_step)
  if config.family == 'vit':
    return Context(segment_ids, None, None, step)
  if positions is None:
    positions = in_segments(x_BT.shape[1], segment_ids)[..., None]
  dtype = jnp.promote_types(param.dtypes(config)[1], jnp.float32)
  half = config.head_dim // 2
  ladder = half // 2 if config.family == 'tower' else half  # a tower's axes have the same frequencies each
  frequencies = jnp.tile(config.rope_base ** (-jnp.arange(ladder, dtype=dtype) / ladder), half // ladder)
  angles = positions[..., axis_of(config, positions.shape[-1])].astype(dtype) * frequencies
  return Context(segment_ids, jnp.cos(angles), jnp.sin(angles), step, windows)


def in_segments(T: int, segment_ids: jax.Array | None) -> jax.Array:
  """[B or 1, T]: the place of each token in its segment."""
  positions = jnp.arange(T)[None]
  if segment_ids is None:
    return positions
  starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
  return positions - jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)


def axis_of(config: config_lib.ModelConfig, axes: int) -> np.ndarray:
  """[head_dim / 2]: the axis of the positions that each frequency turns by.

  With M-RoPE the first frequencies turn by time, then some by height, the rest by width; in a tower half of them by
  height and half by width. Positions of one axis stand for all.
  """
  half = config.head_dim // 2
  sections = (half // 2,) * 2 if config.family == 'tower' else config.rope_sections
  if axes == 1 or not sections:
    return np.zeros(half, int)
  return np.repeat(np.arange(len(sections)), sections)


def rotate(x_BTHh: jax.Array, ctx: Context) -> jax.Array:
  """Rotary position embedding, half-split as Hugging Face has it: dimension i pairs with i + h/2."""
  if ctx.cos_BTf is None:
    return x_BTHh
  x1, x2 = jnp.split(x_BTHh.astype(wide(x_BTHh)), 2, axis=-1)
  cos, sin = ctx.cos_BTf[:, :, None], ctx.sin_BTf[:, :, None]
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTHh.dtype)


def windowed(config: config_lib.ModelConfig, layer: int) -> bool:
  """Whether a layer sees windows, where there are some."""
  return not config.window_layers or layer in config.window_layers


def mask(config: config_lib.ModelConfig, ctx: Context, T: int, layer: int = 1) -> jax.Array:
  """[B or 1, T, T], True where a query (axis 1) may see a key (axis 2).

  Its own document, or window where layer `layer` sees windows; of that, if causal, itself and its past; and of that the last `sliding_window` keys, itself
  included, as transformers counts them.
  """
  ago = jnp.arange(T)[:, None] - jnp.arange(T)
  seen = ago >= (0 if config.causal else -T)
  if config.sliding_window:
    seen &= ago < config.sliding_window
  parts_BT = ctx.segment_ids_BT if ctx.windows_BT is None or not windowed(config, layer) else ctx.windows_BT
  if parts_BT is None:
    return seen[None]
  return seen & (parts_BT[:, :, None] == parts_BT[:, None, :])


def clip(x: jax.Array, limit: float) -> jax.Array:
  """x cut to -limit..limit; 0 is no limit."""
  return jnp.clip(x, -limit, limit) if limit else x


def qk_norm(config: config_lib.ModelConfig, name: str, x_BTHh: jax.Array) -> jax.Array:
  """`model.norm` of queries or keys: of each head with one gain [h] for all heads, or of all H * h numbers together."""
  if config.qk_norm == 'none':
    return x_BTHh
  flat = x_BTHh if config.qk_norm == 'head' else x_BTHh.reshape(*x_BTHh.shape[:2], -1)
  return Norm(config, name=name)(flat).reshape(x_BTHh.shape)


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
    def project(name, w, axis):
      return clip(param.biased(self, name, param.dot('BTD,DHh->BTHh', x_BTD, w), axis), c.clip_qkv)
    q_BTHh = qk_norm(c, 'q_norm', project('q', q, 'heads'))
    k_BSKh = qk_norm(c, 'k_norm', project('k', k, 'kv_heads'))
    v_BSKh = project('v', v, 'kv_heads')
    seen_BTS = mask(c, ctx, x_BTD.shape[1], layer)
    heads_BTHh = attend(rotate(q_BTHh, ctx), rotate(k_BSKh, ctx), v_BSKh, seen_BTS)
    return param.biased(self, 'o', param.dot('BTHh,HhD->BTD', heads_BTHh, o), 'norm')
