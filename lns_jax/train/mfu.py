"""Model FLOPs of a training token and the share of the chip's peak that a run reaches (docs/performance.md)."""

import time

import jax
import jax.numpy as jnp

from lns_jax.config import ModelConfig

# Dense bf16 TFLOP/s of one chip, from the vendors' pages, by JAX's device_kind.
PEAK_TFLOPS = {'TPU v3': 123, 'TPU v4': 275, 'TPU v5 lite': 197, 'TPU v5e': 197, 'TPU v5p': 459, 'TPU v5': 459,
               'TPU v6 lite': 918, 'TPU v6e': 918, 'NVIDIA H100': 989, 'NVIDIA H200': 989, 'NVIDIA A100': 312}


def flops_per_token(config: ModelConfig, T: int) -> float:
  """FLOPs of forward and backward for one token in a row of T: 6 a matmul weight, and causal attention once.

  3 * (2 * weights + 2 * 2 * L * H * h * (T + 1) / 2): the backward pass counts twice the forward pass; scores
  and weighted values each take 2 H h FLOPs a visible key, of which there are (T + 1) / 2 on average. The
  embedding look-up and everything that is not a matrix product count nothing.
  """
  c = config
  attention = c.d_model * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
  weights = c.num_layers * (attention + 3 * c.d_model * c.d_ff) + c.d_model * c.vocab_size
  return 3 * (2 * weights + 2 * c.num_layers * c.num_heads * c.head_dim * (T + 1))


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
