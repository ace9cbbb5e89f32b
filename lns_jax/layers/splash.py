"""Attention by JAX's splash kernel for TPUs, which never holds all scores, and the choice between it and products.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`, which comes with JAX.
"""

import jax

from lns_jax import config as config_lib
from lns_jax import mesh
from lns_jax.errors import UserError
from lns_jax.layers import param

LANES = 128  # of the chip's vector unit: the kernel's blocks are multiples of it
BLOCKS = (512, 256, 128)  # queries, and keys, that the kernel holds at a time: the largest that divides is taken
SHORT = 512  # rows of fewer tokens have scores small enough for plain products; not timed on a TPU
NARROW = 64  # narrower heads leave most of the lanes empty
SAVED = 'heads'  # what policies of `jax.checkpoint` call the kernel's output and normaliser


def obstacle(T: int, platform: str, dtype) -> str:
  """Why the kernel cannot do the attention of rows of T tokens on the mesh in force; '' where it can."""
  part = T // mesh.size('sequence')
  if platform != 'tpu':
    return f'the kernel is for TPUs, not for a {platform}'
  if jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1:
    return 'no mesh in force says how several devices share the rows'
  if dtype.itemsize > 2:
    return f'the kernel multiplies {dtype.name} numbers less exactly than the model does'
  if T % mesh.size('sequence') or part % LANES:
    return f'{part} tokens of a row on a device are no multiple of {LANES}'
  return ''


def choose(config: config_lib.ModelConfig, T: int, platform: str, dtype=None) -> tuple[str, str]:
  """('splash' or 'xla', why) for whole rows of T tokens on a platform, on the mesh in force.

  With model.attention = splash it is the kernel wherever it can be: a model trained with it still opens on a CPU. A
  run refuses at its start instead, see `describe`.

  dtype: that of the queries; by default the config's compute type.
  """
  dtype = param.dtypes(config)[1] if dtype is None else dtype
  if config.attention == 'xla':
    return 'xla', 'model.attention asks for it'
  reason = obstacle(T, platform, dtype)
  if reason:
    return 'xla', reason
  if config.attention == 'splash':
    return 'splash', 'model.attention asks for it'
  if config.head_dim < NARROW:
    return 'xla', f'heads of {config.head_dim} leave most of the kernel\'s {LANES} lanes empty'
  if T < SHORT:
    return 'xla', f'the scores of {T} tokens are small'
  return 'splash', f'rows of {T} tokens and heads of {config.head_dim} in {dtype.name} suit the kernel'


def describe(config: config_lib.ModelConfig, T: int, platform: str) -> str:
  """A line for the user: what computes attention in rows of T tokens, and why.

  Raises UserError when model.attention = splash cannot be.
  """
  name, reason = choose(config, T, platform)
  if config.attention == 'splash' and name != 'splash':
    raise UserError(f'model.attention = splash cannot be here: {reason}; auto takes plain products (xla) then.')
  return f'attention: {name} ({reason})'


def mask(config: config_lib.ModelConfig, T: int, layer: int):
  """The kernel's own mask of one head, documents apart: as `attention.mask` has it."""
  from jax.experimental.pallas.ops.tpu import splash_attention as kernels  # half a second that a CPU need not wait
  if not config.causal:
    return kernels.FullMask((T, T))
  window = config.window(layer)
  # The kernel's window counts the keys behind the query, not the query itself.
  return kernels.LocalMask((T, T), (window - 1, 0), offset=0) if window else kernels.CausalMask((T, T))


def blocks(T: int, part: int):
  """Sizes of the kernel's blocks for T keys and the `part` of the queries that lie on a device; not timed on a TPU."""
  from jax.experimental.pallas.ops.tpu import splash_attention as kernels
  q, kv = (next(b for b in BLOCKS if n % b == 0) for n in (part, T))
  return kernels.BlockSizes(
      block_q=q, block_kv=kv, block_kv_compute=kv, block_q_dkv=q, block_kv_dkv=kv, block_kv_dkv_compute=kv,
      block_q_dq=q, block_kv_dq=kv)


def attend(config: config_lib.ModelConfig, layer: int, q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array,
           segment_ids_BT: jax.Array | None, interpret: bool = False) -> jax.Array:
  """softmax(q k / sqrt(h)) v as of `attention.attend` under `attention.mask` of the layer. Returns [B, T, H, h].

  On the mesh in force every device has its rows, heads and queries, and gathers all keys of its rows and heads.
  interpret: run the kernel step by step, on any platform.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as kernels
  T, H, h = q_BTHh.shape[1:]
  over, parts = jax.sharding.get_abstract_mesh(), mesh.size('sequence')
  kernel = kernels.make_splash_mha(
      kernels.MultiHeadMask([mask(config, T, layer)] * H), block_sizes=blocks(T, T // parts),
      head_shards=mesh.size('tensor'), q_seq_shards=parts if config.causal else 1,  # the full mask has nothing to slice
      residual_checkpoint_name=SAVED, interpret=interpret)
  def local(kernel, q_BTHh, k_BTKh, v_BTKh, *ids):
    if parts > 1:  # here, so that their gradients are not only summed but split again
      k_BTKh, v_BTKh = (jax.lax.all_gather(x, 'sequence', axis=1, tiled=True) for x in (k_BTKh, v_BTKh))
    q, k, v = (x.swapaxes(1, 2) for x in (q_BTHh * h ** -0.5, k_BTKh, v_BTKh))
    return jax.vmap(kernel)(q, k, v, *([kernels.SegmentIds(*ids)] if ids else [])).swapaxes(1, 2)
  ids = () if segment_ids_BT is None else (segment_ids_BT, segment_ids_BT)
  if over.empty:
    return local(kernel, q_BTHh, k_BTKh, v_BTKh, *ids)
  queries, keys = (mesh.spec(('batch', 'seq', heads, 'head_dim')) for heads in ('heads', 'kv_heads'))
  whole = jax.sharding.AbstractMesh(over.axis_sizes, over.axis_names)  # inside of a pipeline too, which takes an axis
  of_kernel = kernel.manual_sharding_spec(jax.sharding.NamedSharding(whole, mesh.spec(('heads', 'seq'))))
  of_ids = (mesh.spec(('batch', 'seq')), mesh.spec(('batch', 'keys')))[:len(ids)]
  # Over the axes that are left; without the check of what varies over them, which kernels do not declare.
  return jax.shard_map(local, in_specs=(of_kernel, queries, keys, keys, *of_ids), out_specs=queries,
                       axis_names=set(over.auto_axes), check_vma=False)(kernel, q_BTHh, k_BTKh, v_BTKh, *ids)
