"""Evaluation as a property of the data: a whole split, token-weighted, the same on any number of devices."""

import math

import jax
import numpy as np

from lns_jax import sharding
from lns_jax.config import ModelConfig
from lns_jax.models import transformer


def make_eval_step(config: ModelConfig, mesh, params_sharding, by_row: bool = False):
  """Compiled (params, batch, step) -> {'loss', 'weight', and the family's `scores`: sums over the batch}, on a mesh.

  by_row: sums over each row instead, [B].
  """
  family = transformer.family(config)
  def sums(params, normed_BTD, batch):
    total, weight = family.summed_loss(config, params, normed_BTD, batch, chunk=-1)
    return {'loss': total, 'weight': weight, **family.scores(config, params, normed_BTD, batch)}
  def run(params, batch, step):
    normed_BTD, _ = transformer.before_head(config, params, batch, step=step)
    if not by_row:
      return sums(params, normed_BTD, batch)
    return jax.vmap(lambda *row: sums(params, *jax.tree.map(lambda v: v[None], row)))(normed_BTD, batch)
  everywhere = sharding.replicated(mesh)
  return jax.jit(run, in_shardings=(params_sharding, sharding.batch(mesh), everywhere), out_shardings=everywhere)


def batch_size(mesh, wanted: int) -> int:
  """The nearest size at or above `wanted` that the mesh divides: the padding rows have weight 0."""
  parts = sharding.batch_parts(mesh)
  return -(-wanted // parts) * parts


def place(mesh, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
  """The rows of a batch that this process reads, see `sharding.rows` -> global arrays."""
  where, here, parts = sharding.batch(mesh), sharding.parts_here(mesh), sharding.batch_parts(mesh)
  def globally(value):
    each = len(value) // len(here)
    def part(index):
      at = each * np.searchsorted(here, (index[0].start or 0) // each)
      return value[at:at + each]
    return jax.make_array_from_callback((each * parts, *value.shape[1:]), where, part)
  return {name: globally(value) for name, value in batch.items()}


def evaluate(eval_step, params, dataset, mesh, *, step=None, split: str = 'validation', rows: int,
             max_tokens: int = 0, progress=lambda batches, total: batches, each=lambda sums: None) -> dict[str, float]:
  """Loss over a split.

  Args:
    eval_step: from `make_eval_step`.
    step: finished updates, during a training run; None: a loaded model, whose config knows.
    rows: rows per batch, any number that `batch_size` allows; it does not change the result.
    max_tokens: stop before the row that would exceed it; 0: the whole split.
    progress: (batches, how many there are) -> the batches, for a bar.
    each: called with what `eval_step` found of every batch.

  Returns:
    'loss' nats per token, 'perplexity', 'bits_per_byte', 'tokens', 'bytes', or 'loss' nats per image, 'accuracy'
    (top-1) and 'images'; and of text 'paper_loss': the authors' mean of batch means over n + 1 instead of n batches
    (paper.md 6.4), which does depend on `rows`.
  """
  sums, means = {}, []
  batches = dataset.eval_batches(split, rows, max_tokens=max_tokens, rows=sharding.rows(mesh, rows))
  with sharding.use(mesh):
    for batch in progress(batches, -(-dataset.rows_within(split, max_tokens) // rows)):
      of_batch = jax.device_get(eval_step(params, place(mesh, batch), step))
      each(of_batch)
      found = {k: float(np.sum(v, dtype=np.float64)) for k, v in of_batch.items()}
      sums = {k: sums.get(k, 0.0) + v for k, v in found.items()}
      means.append(found['loss'] / max(found['weight'], 1.0))
  return summary(sums, means)


def perplexity(loss: float) -> float:
  """exp(loss), infinite where that overflows."""
  return math.exp(loss) if loss < 700 else math.inf


def summary(sums: dict[str, float], batch_means: list[float]) -> dict[str, float]:
  """Numbers of an evaluation from its sums of 'loss' in nats, 'weight', and 'bytes' or 'correct'; and batch means."""
  loss, count = sums['loss'] / sums['weight'], int(sums['weight'])
  if 'correct' in sums:
    return {'loss': loss, 'accuracy': sums['correct'] / sums['weight'], 'images': count}
  bits = sums['loss'] / math.log(2)
  return {'loss': loss, 'paper_loss': sum(batch_means) / (len(batch_means) + 1), 'perplexity': perplexity(loss),
          'tokens': count, 'bytes': int(sums['bytes']),
          'bits_per_byte': bits / sums['bytes'] if sums['bytes'] else None}
