"""Self-attention with rotary positions or none, grouped keys, and a mask by document, past and window."""

import functools
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from lns_jax import config as config_lib
from lns_jax import mesh
from lns_jax.layers import param, rope, splash
from lns_jax.layers.norms import Norm, times, wide


LONG = 1024  # tokens of rows whose scores are worth a larger program


class Past(typing.NamedTuple):
  """Where tokens stand that continue cached rows, see `lns_jax.models.decode`."""

  taken: jax.Array  # int32 scalar: slots in use, behind which the tokens' own follow
  first_B: jax.Array  # int32: the slot of each row's first token; those before it hold padding


class Context(typing.NamedTuple):
  """What every layer shares. `None` segments: one document a row; `None` step: a finished model."""

  segment_ids_BT: jax.Array | None
  cos_BTf: jax.Array | None  # f = head_dim / 2; None: positions are in the embedding
  sin_BTf: jax.Array | None
  step: jax.Array | float | None = None  # finished updates, for factors that grow with them
  past: Past | None = None  # None: the rows are whole
  windows_BT: jax.Array | None = None  # segments of the layers that divide an image into windows


def context(config: config_lib.ModelConfig, x_BT: jax.Array, segment_ids: jax.Array | None = None,
            step: jax.Array | None = None, past: Past | None = None, *, coordinates: jax.Array | None = None,
            windows: jax.Array | None = None) -> Context:
  """Rotary tables and mask ingredients.

  x_BT: tokens or the stream [B, T, ...], of which only T is read.
  segment_ids: [B, T]; None: one document a row.
  step: finished updates while training; otherwise those of `config.ramp_step`.
  past: of rows whose beginning is cached; they have no segments.
  coordinates: [B, T, axes] positions; by default one axis, which restarts at every segment.
  windows: [B, T] segments of the layers that divide an image into windows.
  """
  if step is None and config.ramp_step >= 0:
    step = float(config.ramp_step)
  if config.family in ('vit', 'encoder') or config.positions != 'rotary':
    return Context(segment_ids, None, None, step, past)
  if coordinates is None:
    coordinates = positions(x_BT.shape[1], segment_ids, past)[..., None]
  dtype = jnp.promote_types(param.dtypes(config)[1], jnp.float32)
  length_B1 = jnp.max(coordinates, axis=(1, 2))[:, None] + 1
  repeats = 2 if config.family == 'tower' else 1  # rows and columns of patches have the same frequencies
  turn = rope.rotation(config.rope_base, config.head_dim // 2 // repeats, config.rope_scaling, dtype, length_B1)
  frequencies = jnp.concatenate([turn.frequencies] * repeats, axis=-1)
  angles = coordinates[..., axis_of(config, coordinates.shape[-1])].astype(dtype) * frequencies
  cos, sin = times(jnp.cos(angles), turn.factor), times(jnp.sin(angles), turn.factor)
  return Context(segment_ids, cos, sin, step, past, windows)


def axis_of(config: config_lib.ModelConfig, axes: int) -> np.ndarray:
  """[head_dim / 2]: the axis of the coordinates that each frequency turns by; a single axis stands for all.

  With M-RoPE (arXiv 2409.12191) the first ones turn by time, the next by row, the last by column; in a vision tower
  half of them by row and half by column.
  """
  half = config.head_dim // 2
  sections = (half // 2,) * 2 if config.family == 'tower' else config.rope_sections
  return np.zeros(half, int) if axes == 1 or not sections else np.repeat(np.arange(len(sections)), sections)


def positions(T: int, segment_ids_BT: jax.Array | None, past: Past | None = None) -> jax.Array:
  """[B or 1, T] int32: 0, 1, ... from the start of each segment, or of the row that the tokens continue."""
  ids = jnp.arange(T)[None]
  if past is not None:
    return jnp.maximum(past.taken + ids - past.first_B[:, None], 0)
  if segment_ids_BT is None:
    return ids
  starts = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
  return ids - jax.lax.cummax(jnp.where(starts, ids, 0), axis=1)


def rotate(x_BTHh: jax.Array, ctx: Context) -> jax.Array:
  """Rotary position embedding, half-split as Hugging Face has it: dimension i pairs with i + h/2."""
  if ctx.cos_BTf is None:
    return x_BTHh
  cos, sin = (jnp.concatenate([table, table], axis=-1)[:, :, None] for table in (ctx.cos_BTf, ctx.sin_BTf))
  return (x_BTHh * cos + quarter_turn(x_BTHh, mesh.platform()) * sin).astype(x_BTHh.dtype)


def quarter_turn(x_BTHh: jax.Array, platform: str) -> jax.Array:
  """The halves (x1, x2) of each head -> (-x2, x1).

  On a TPU by a matrix of 0, 1 and -1, which is exact and part of the pass around it: halves of heads fill a part of the
  chip's lanes, and each is written to memory. Compiled for v5e, a layer's attention with 32 heads of 128 takes a
  seventh less bytes so. Other platforms are faster without a product.
  """
  half = x_BTHh.shape[-1] // 2
  if platform != 'tpu':
    return jnp.concatenate([-x_BTHh[..., half:], x_BTHh[..., :half]], axis=-1)
  turn = np.kron([[0, 1], [-1, 0]], np.eye(half)).astype(x_BTHh.dtype)
  # The highest precision is for its gradient, whose factor is float32.
  return jnp.einsum('BTHh,hk->BTHk', x_BTHh, turn, precision=jax.lax.Precision.HIGHEST,
                    preferred_element_type=wide(x_BTHh))


def mask(config: config_lib.ModelConfig, ctx: Context, T: int, layer: int, S: int | None = None) -> jax.Array:
  """[B or 1, T, S], True where a query (axis 1) of the layer may see a key (axis 2); S: slots of a cache, else T.

  Its own document, or window of an image; of that, if causal, itself and its past; and of that the layer's window of
  last keys, itself included, as transformers counts them.
  """
  taken = 0 if ctx.past is None else ctx.past.taken
  ago = (taken + jnp.arange(T))[:, None] - jnp.arange(T if S is None else S)
  seen = ago >= (0 if config.causal else -T)
  if config.window(layer) and config.family != 'tower':
    seen &= ago < config.window(layer)
  if ctx.past is not None:
    return seen & (jnp.arange(S) >= ctx.past.first_B[:, None])[:, None]
  parts_BT = parts(config, ctx, layer)
  if parts_BT is None:
    return seen[None]
  return seen & (parts_BT[:, :, None] == parts_BT[:, None, :])


def parts(config: config_lib.ModelConfig, ctx: Context, layer: int) -> jax.Array | None:
  """[B, T] ids of what the layer keeps apart: documents, or windows of an image; None: a row is one."""
  return ctx.windows_BT if config.window(layer) and config.family == 'tower' else ctx.segment_ids_BT


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
  q_BTKGh = q_BTHh.reshape(B, T, K, H // K, h) * h ** -0.5
  scores = jnp.einsum('BTKGh,BSKh->BKGTS', q_BTKGh, k_BSKh, precision=param.matmul_precision(q_BTHh.dtype),
                      preferred_element_type=wide(q_BTHh))
  scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(scores.dtype).min)
  weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
  return mean(weights, v_BSKh, mesh.platform())


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def mean(weights_BKGTS: jax.Array, v_BSKh: jax.Array, platform: str) -> jax.Array:
  """The mean of values by weights that are not normalised, [B, T, H, h].

  Divided behind the product with the values, so that the gradient of the divisor is no pass over the weights. The
  derivative is made of the mean itself and the divisor, which are kept for remat.
  """
  sums_BTHh, total_BTH = sums_and_total(weights_BKGTS, v_BSKh, platform)
  return (sums_BTHh / total_BTH[..., None]).astype(v_BSKh.dtype)


@mean.defjvp
def _(platform, primals, tangents):
  (weights, v), (d_weights, d_v) = primals, tangents
  sums_BTHh, total_BTH = sums_and_total(weights, v, platform)
  total_BTH = checkpoint_name(total_BTH, 'heads')
  y = checkpoint_name((sums_BTHh / total_BTH[..., None]).astype(v.dtype), 'heads')
  d_sums = weigh(d_weights, v) + weigh(weights, d_v)
  return y, ((d_sums - y * total(d_weights)[..., None]) / total_BTH[..., None]).astype(v.dtype)


def sums_and_total(weights_BKGTS: jax.Array, v_BSKh: jax.Array, platform: str) -> tuple[jax.Array, jax.Array]:
  """(sums of weights times values [B, T, H, h], sums of weights [B, T, H]), float32 or wider.

  On a TPU the latter are one more column of the product, of values that are 1, and no pass over float32 weights of
  their own. Not where the columns fill its lanes of 128 already; nor of single tokens: their values are a cache, which
  would be copied.
  """
  if platform != 'tpu' or weights_BKGTS.shape[3] == 1 or v_BSKh.shape[-1] % 128 == 0:
    return weigh(weights_BKGTS, v_BSKh), total(weights_BKGTS)
  both = weigh(weights_BKGTS, jnp.concatenate([v_BSKh, jnp.ones_like(v_BSKh[..., :1])], axis=-1))
  return both[..., :-1], both[..., -1]


def weigh(weights_BKGTS: jax.Array, v_BSKh: jax.Array) -> jax.Array:
  """The sum over S of weights times values, [B, T, H, h], float32 or wider."""
  B, K, G, T, _ = weights_BKGTS.shape
  return jnp.einsum('BKGTS,BSKh->BTKGh', weights_BKGTS.astype(v_BSKh.dtype), v_BSKh,
                    precision=param.matmul_precision(v_BSKh.dtype),
                    preferred_element_type=wide(v_BSKh)).reshape(B, T, K * G, -1)


def total(weights_BKGTS: jax.Array) -> jax.Array:
  """The sum over S of weights, [B, T, H]."""
  B, K, G, T, _ = weights_BKGTS.shape
  return jnp.sum(weights_BKGTS, axis=-1).transpose(0, 3, 1, 2).reshape(B, T, K * G)


def attend_behind(q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, mask_BTS: jax.Array) -> jax.Array:
  """`attend` where no query sees a key behind it: in four parts of long rows, each with the keys that it may see.

  Three eighths of the scores are not computed, and a quarter of them at most exists at a time.
  """
  T = q_BTHh.shape[1]
  part = T // 4 if T >= LONG and T % 4 == 0 and mesh.size('sequence') == 1 else T
  found = [attend(q_BTHh[:, i:i + part], k_BTKh[:, :i + part], v_BTKh[:, :i + part], mask_BTS[:, i:i + part, :i + part])
           for i in range(0, T, part)]
  return jnp.concatenate(found, axis=1)


def chosen(config: config_lib.ModelConfig, ctx: Context, layer: int, q_BTHh: jax.Array, k_BSKh: jax.Array,
           v_BSKh: jax.Array) -> jax.Array:
  """`attend` under the layer's `mask`, by products or by the kernel, as `splash.choose` says. Returns [B, T, H, h].

  Where the mesh splits T, queries stay where they are and each device gathers the keys and values of its rows.
  """
  T = q_BTHh.shape[1]
  if ctx.past is not None:
    return attend(q_BTHh, k_BSKh, v_BSKh, mask(config, ctx, T, layer, k_BSKh.shape[1]))
  lay = lambda axis, heads, x: mesh.constrain(x, ('batch', axis, heads, 'head_dim'))
  # Keys are split first: asked for whole ones alone, the partitioner gathers the stream before their projection.
  q_BTHh, k_BSKh, v_BSKh = lay('seq', 'heads', q_BTHh), lay('seq', 'kv_heads', k_BSKh), lay('seq', 'kv_heads', v_BSKh)
  if splash.choose(config, T, mesh.platform(), q_BTHh.dtype)[0] == 'splash':
    return splash.attend(config, layer, q_BTHh, k_BSKh, v_BSKh, parts(config, ctx, layer))
  k_BSKh, v_BSKh = lay('keys', 'kv_heads', k_BSKh), lay('keys', 'kv_heads', v_BSKh)
  products = attend_behind if config.causal else attend
  return products(q_BTHh, k_BSKh, v_BSKh, mask(config, ctx, T, layer))


class Attention(nn.Module):
  """f of the attention sub-layer: W_o concat(heads)."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, ctx: Context, layer: int) -> jax.Array:
    """layer: 1-based index, for its window and the initialisation. Returns [B, T, D]."""
    c = self.config
    D, H, K, h = c.d_model, c.num_heads, c.num_kv_heads, c.head_dim
    q = param.matrix(self, 'q', 'in', layer, (D, H, h), ('embed', 'heads', 'head_dim'), D)
    k = param.matrix(self, 'k', 'in', layer, (D, K, h), ('embed', 'kv_heads', 'head_dim'), D)
    v = param.matrix(self, 'v', 'value', layer, (D, K, h), ('embed', 'kv_heads', 'head_dim'), D)
    o = param.matrix(self, 'o', 'out', layer, (H, h, D), ('heads', 'head_dim', 'embed'), H * h)
    def project(name, w, axis):
      return clip(param.biased(self, name, param.product(c, 'BTD,DHh->BTHh', x_BTD, w), axis), c.clip_qkv)
    q_BTHh = qk_norm(c, 'q_norm', project('q', q, 'heads'))
    k_BSKh = qk_norm(c, 'k_norm', project('k', k, 'kv_heads'))
    v_BSKh = project('v', v, 'kv_heads')
    k_BSKh, v_BSKh = self.cached(ctx, rotate(k_BSKh, ctx), v_BSKh)
    heads_BTHh = q_BTHh  # to declare parameters shapes are enough, and the one token of `init` divides over no mesh
    if not self.is_initializing():
      heads_BTHh = chosen(c, ctx, layer, rotate(q_BTHh, ctx), k_BSKh, v_BSKh)
    return param.biased(self, 'o', param.product(c, 'BTHh,HhD->BTD', heads_BTHh, o), 'norm')

  def cached(self, ctx: Context, k_BTKh: jax.Array, v_BTKh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, S, K, h] of all slots of a cache, the new ones put in; without a cache the new ones.

    The cache is the collection 'cache' of variables: 'k' [B * K, S, h] and 'v' [B * K, h, S], as the products of
    `attend` read them on a CPU, so that a step neither copies nor transposes what is there.
    """
    if not self.has_variable('cache', 'k'):
      return k_BTKh, v_BTKh
    B, T, K, h = k_BTKh.shape
    k, v = self.variable('cache', 'k'), self.variable('cache', 'v')
    put = jax.lax.dynamic_update_slice_in_dim
    k.value = put(k.value, k_BTKh.swapaxes(1, 2).reshape(B * K, T, h), ctx.past.taken, axis=1)
    v.value = put(v.value, v_BTKh.transpose(0, 2, 3, 1).reshape(B * K, h, T), ctx.past.taken, axis=2)
    return k.value.reshape(B, K, -1, h).swapaxes(1, 2), v.value.reshape(B, K, h, -1).transpose(0, 3, 1, 2)
