"""Evaluation as a property of the data: a whole split, token-weighted, the same on any number of devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import sharding
from lns_jax.config import ModelConfig
from lns_jax.models import loss as loss_lib
from lns_jax.train import step as step_lib


CHUNK = 32  # positions whose logits exist at a time


def make_eval_step(config: ModelConfig, mesh, params_sharding):
  """Compiled (params, batch, token_bytes [V], step) -> (loss sum, weight, weighed bytes), scalars, on a mesh."""
  def run(params, batch, token_bytes, step):
    total, (weight, _) = step_lib.loss_sums(config, params, batch, chunk=CHUNK, step=step)
    return total, weight, jnp.sum(token_bytes[batch['targets']] * loss_lib.weights(batch))
  everywhere = sharding.replicated(mesh)
  return jax.jit(run, in_shardings=(params_sharding, sharding.batch(mesh), everywhere, everywhere),
                 out_shardings=everywhere)


def batch_size(mesh, wanted: int) -> int:
  """The nearest size at or above `wanted` that the mesh divides: the padding rows have weight 0."""
  parts = sharding.batch_parts(mesh)
  return -(-wanted // parts) * parts


def place(mesh, batch: dict[str, np.ndarray]):
  """Host rows of this process -> global arrays."""
  where = sharding.batch(mesh)
  return {k: jax.make_array_from_process_local_data(where, v) for k, v in batch.items()}


def evaluate(eval_step, params, dataset, mesh, *, step=None, split: str = 'validation', rows: int,
             max_tokens: int = 0, progress=lambda batches: batches) -> dict[str, float]:
  """Loss over a split.

  Args:
    eval_step: from `make_eval_step`.
    step: finished updates, during a training run; None: a loaded model, whose config knows.
    rows: rows per batch, any number that `batch_size` allows; it does not change the result.
    max_tokens: stop before the row that would exceed it; 0: the whole split.
    progress: wraps the iterator of batches, for a bar.

  Returns:
    'loss' nats per token, 'perplexity', 'bits_per_byte', 'tokens', 'bytes', and 'paper_loss': the authors'
    mean of batch means over n + 1 instead of n batches (paper.md 6.4), which does depend on `rows`.
  """
  token_bytes = jax.device_put(dataset.tokenizer.token_bytes, sharding.replicated(mesh))
  sums, means = np.zeros(3), []
  batches = dataset.eval_batches(split, rows, max_tokens=max_tokens, process_index=jax.process_index(),
                                 process_count=jax.process_count())
  with sharding.use(mesh):
    for batch in progress(batches):
      of_batch = np.array(jax.device_get(eval_step(params, place(mesh, batch), token_bytes, step)), np.float64)
      sums += of_batch
      means.append(of_batch[0] / max(of_batch[1], 1.0))
  return summary(*sums, means)


def perplexity(loss: float) -> float:
  """exp(loss), infinite where that overflows."""
  return math.exp(loss) if loss < 700 else math.inf


def summary(total: float, weight: float, n_bytes: float, batch_means: list[float]) -> dict[str, float]:
  """Numbers of an evaluation from its sums: nats, tokens, bytes, and the means of its batches."""
  loss = float(total / weight)
  return {'loss': loss, 'perplexity': perplexity(loss), 'tokens': int(weight), 'bytes': int(n_bytes),
          'bits_per_byte': float(total / math.log(2) / n_bytes) if n_bytes else None,
          'paper_loss': float(sum(batch_means) / (len(batch_means) + 1))}
