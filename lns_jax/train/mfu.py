"""Model FLOPs of a training token and the share of the chip's peak that a run reaches (docs/performance.md)."""

import time

import jax
import jax.numpy as jnp

from lns_jax.config import ModelConfig
from lns_jax.train import chips

# Dense bf16 TFLOP/s of one device, of v3 and v7x half a chip, from the vendors' pages, by JAX's device_kind.
PEAK_TFLOPS = {kind: chip.tflops for chip in chips.CHIPS.values() for kind in chip.kinds} | {
    'TPU v3': 61.5, 'NVIDIA H100': 989, 'NVIDIA H200': 989, 'NVIDIA A100': 312}


def visible_keys(config: ModelConfig, T: int) -> float:
  """Mean number of keys that a query in a row of T sees: T, (T + 1) / 2 if causal, fewer within a window of W.

  Of a window the first W queries see 1..W keys and the others W each: W - W (W - 1) / (2 T) on average. The mean is
  over layers too, some of which may have no window.
  """
  if not config.causal:
    return T
  windows = [min(config.window(l) or T, T) for l in config.layer_ids]
  return sum(W - W * (W - 1) / (2 * T) for W in windows) / len(windows)


def flops_per_token(config: ModelConfig, T: int) -> float:
  """FLOPs of forward and backward for one token in a row of T: 6 a matmul weight, and visible attention once.

  3 * (2 * weights + 2 * 2 * L * H * h * `visible_keys`): the backward pass counts twice the forward pass; scores
  and weighted values each take 2 H h FLOPs a visible key. The embedding look-up and everything that is not a
  matrix product count nothing.
  """
  c = config
  attention = c.d_model * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
  mlp = (3 if c.mlp == 'swiglu' else 2) * c.d_model * c.d_ff
  if c.family == 'vit':  # the patches' matrix for every patch, the classifier once an image
    ends = c.d_model * (c.patch_size**2 * c.channels * (T - c.has_cls) + c.num_classes) / T
  else:
    ends = c.d_model * c.vocab_size
  weights = c.num_layers * (attention + mlp) + ends
  return 3 * (2 * weights + 4 * c.num_layers * c.num_heads * c.head_dim * visible_keys(c, T))


def peak_flops() -> tuple[float, str]:
  """(FLOP/s of all devices together, where the number is from).

  Of a chip that is not in the table, and of a CPU, it is the best of a few plain fp32 matrix products.
  """
  device = jax.devices()[0]
  for kind, tflops in PEAK_TFLOPS.items():
    if device.device_kind.startswith(kind):
      return tflops * 1e12 * jax.device_count(), f'table: {kind}'
  n = 1024
  a = jnp.ones((n, n), jnp.float32)
  product = jax.jit(jnp.matmul)
  product(a, a).block_until_ready()
  best = float('inf')
  for _ in range(5):
    start = time.perf_counter()
    product(a, a).block_until_ready()
    best = min(best, time.perf_counter() - start)
  # Forced host devices share the same cores: the product above used them all.
  return 2 * n**3 / best * (1 if device.platform == 'cpu' else jax.device_count()), 'measured: fp32 product of 1024'
