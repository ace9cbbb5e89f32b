"""Gradients by layer of any loaded model, without training: norms, Taylor importance, stable ranks.

Each number is one of the gradient g of a sequence's own loss (mean over its tokens), averaged over sequences by their
tokens, which gives an interval over sequences. A mean of norms is not the norm of the mean gradient: that is at most
as large, and smaller the more sequences disagree. theta . g is linear, so that its mean is exactly that of the loss
over all tokens.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from lns_jax.config import ModelConfig
from lns_jax.depth import finite, walk
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.depth.states import INPUTS
from lns_jax.errors import UserError
from lns_jax.layers import attention, block, param, schemes
from lns_jax.layers.norms import wide
from lns_jax.models import layout, transformer

ITERATIONS = 40  # of the power method
PARTS = {'': '', **{f'{sub}_': sub for sub in schemes.SUBLAYERS}}  # prefix of a measure -> of the parameters' paths


def thirds(values) -> np.ndarray:
  """Shares of the first, middle and last third of the layers in a sum over them: [..., L] -> [..., 3].

  The last has L // 3 layers; of one or two layers left over the first takes one, then the middle. Fewer than three
  layers have no thirds: NaN.
  """
  values = np.asarray(values, np.float64)
  parts = np.stack([np.sum(part, axis=-1) for part in np.array_split(values, 3, axis=-1)], axis=-1)
  with np.errstate(invalid='ignore', divide='ignore'):
    return parts / np.sum(values if values.shape[-1] >= 3 else values * np.nan, axis=-1, keepdims=True)


def stable_rank(g: jax.Array) -> jax.Array:
  """|g|_F^2 / |g|_2^2 of a matrix [m, n], 0 of a zero matrix; the spectral norm by the power method on g^T g."""
  g = g.astype(wide(g))
  largest = jnp.max(jnp.abs(g))
  g = g / jnp.where(largest > 0, largest, 1)  # a gradient's squares may underflow
  times = functools.partial(jnp.matmul, precision=param.matmul_precision(g.dtype))
  def step(_, v):
    v = times(times(v, g.T), g)
    return v / jnp.maximum(jnp.linalg.norm(v), jnp.finfo(v.dtype).tiny)
  start = jax.random.normal(jax.random.key(0), g.shape[1:], g.dtype)
  v = jax.lax.fori_loop(0, ITERATIONS, step, start / jnp.linalg.norm(start))
  return jnp.where(largest > 0, jnp.sum(jnp.square(g)) / jnp.sum(jnp.square(times(v, g.T))), 0)


def _matrix(path: str, g: jax.Array) -> jax.Array:
  """A weight as inputs x outputs; those of attention are [D, H, h], or [H, h, D] for the output."""
  return g.reshape(-1, g.shape[-1]) if path == 'attn/o' else g.reshape(len(g), -1)


def _numbers(p, g) -> dict[str, dict[str, jax.Array]]:
  """What is kept of the gradient of one layer and one sequence, scalars by path: 'square', 'dot', 'rank'."""
  p, g = (traverse_util.flatten_dict(tree, sep='/') for tree in (p, g))
  wider = lambda x: x.astype(wide(x))
  return {'square': {path: _square(x) for path, x in g.items()},
          'dot': {path: jnp.sum(wider(p[path]) * wider(x)) for path, x in g.items()},
          'rank': {path: stable_rank(_matrix(path, x)) for path, x in g.items() if x.ndim > 1}}


def _backward(config: ModelConfig, run: layout.Run, placed):
  """The step of a scan over a run's layers, backwards, for each sequence by itself.

  (dL/d what leaves a layer, (its parameters, its position in the run, what entered)) -> (dL/d what entered, numbers).
  """
  factors = walk.factors_at(config, run)
  def step(leaving_BTD, scanned):
    p, i, x_BTD = scanned
    override = factors(i)
    def row(x_TD, placed, leaving_TD):
      ctx = attention.context(config, x_TD[None], **{name: v[None] for name, v in placed.items()})
      def layer(p, x_TD):
        return block.Block(config).apply({'params': p}, x_TD[None], ctx, run[0], override)[0][0]
      g, entering_TD = jax.vjp(layer, p, x_TD)[1](leaving_TD)
      return entering_TD, _numbers(p, g) | {'state': _square(entering_TD)}
    return jax.vmap(row)(x_BTD, placed, leaving_BTD)
  return step


def _square(x: jax.Array) -> jax.Array:
  return jnp.sum(jnp.square(x.astype(wide(x))))


@functools.partial(jax.jit, static_argnums=0)
def _passes(config: ModelConfig, params, batch):
  """Forward, then back layer by layer; of the parameters' gradient only one layer's exists at a time.

  Returns (losses [B], weights [B], squares of dL/d what leaves the last layer [B], for each run of layers its numbers
  [layers, B], see `_numbers`, and 'state', squares of dL/d what enters).
  """
  placed = transformer.placement(batch)
  x_BTD, ctx = transformer.enter(config, params, transformer.inputs(config, batch), **placed)
  layer = walk.layer_at(config, params, ctx)
  before, last_BTD = walk.entering(layer, x_BTD, config.num_layers)
  def loss(last_BTD):
    normed_BTD = transformer.final_norm(config, params, last_BTD)
    losses_B, w_B = transformer.family(config).row_losses(config, params, normed_BTD, batch)
    means_B = losses_B / jnp.where(w_B > 0, w_B, 1)
    return jnp.sum(means_B), (means_B, w_B)
  leaving_BTD, (losses_B, w_B) = jax.grad(loss, has_aux=True)(last_BTD)
  top_B, found, end = jax.vmap(_square)(leaving_BTD), [], config.num_layers
  for run in reversed(layout.runs(config)):
    n = len(run)
    scanned = params['layers'][layout.run_name(run)], jnp.arange(n), before[end - n:end]
    leaving_BTD, numbers = jax.lax.scan(_backward(config, run, placed), leaving_BTD, scanned, reverse=True)
    found.insert(0, numbers)
    end -= n
  return losses_B, w_B, top_B, found


def _rows(found: list[dict], top_B, w_B) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Measure -> (values [B, ...], weights [B, ...]) from the numbers of all runs."""
  def total(stat, prefix):  # [B, L]
    of_run = lambda numbers: sum(v for path, v in numbers[stat].items() if path.startswith(prefix))
    return np.concatenate([of_run(numbers) for numbers in found]).T
  rows = {}
  for name, prefix in PARTS.items():
    rows[f'{name}grad_norm'] = np.sqrt(total('square', prefix)), w_B
    rows[f'{name}taylor'] = np.abs(total('dot', prefix)), w_B
    rows[f'{name}theta_grad'] = total('dot', prefix), w_B
  for name, prefix in list(PARTS.items())[1:]:
    ranks = total('rank', prefix)
    count = np.concatenate([sum(np.asarray(v > 0, float) for path, v in numbers['rank'].items()
                                if path.startswith(prefix)) for numbers in found]).T
    rows[f'{name}stable_rank'] = ranks / np.maximum(count, 1), w_B[:, None] * (count > 0)
  states = np.concatenate([*(numbers['state'] for numbers in found), top_B[None]]).T
  rows['state_grad_norm'] = np.sqrt(states), w_B
  return rows


def _check(config: ModelConfig, params, losses_B, found: list[dict], sequences: int):
  """Raises UserError that names what is not finite first: a weight, a loss, or the gradient nearest to the loss."""
  gradients = [(l, path, values[i]) for run, numbers in zip(layout.runs(config), found)
               for i, l in enumerate(run) for path, values in numbers['square'].items()]
  if np.all(np.isfinite(losses_B)) and all(np.all(np.isfinite(values)) for _, _, values in gradients):
    return
  finite.check_weights(params)
  first_bad = lambda values: sequences + int(np.argmin(np.isfinite(values)))
  if not np.all(np.isfinite(losses_B)):
    raise UserError(f'the loss is not finite at sequence {first_bad(losses_B)}.')
  l, path, values = next(entry for entry in reversed(gradients) if not np.all(np.isfinite(entry[2])))
  raise UserError(f'the gradient of layers/{l}/{path} is not finite at sequence {first_bad(values)}.')


def gradients(config: ModelConfig, params, batches, *, seed: int = 0) -> dict[str, Estimate]:
  """Gradients of the loss by layer and sub-layer: averages over sequences, see the module.

  A sub-layer's parameters are its matrices, biases, norms' gains and learned factors; a layer's those of both, and
  GPAS' gate. ITERATIONS steps of the power method give stable ranks that are a little too large: by 2.2 % on a Gaussian
  matrix of 1024 x 2048.

  Args:
    batches: as everywhere, with 'targets' [B, T], or 'labels' [B] beside images.

  Returns:
    'grad_norm', 'attn_grad_norm', 'mlp_grad_norm' [L]: |g|, nats per unit of the parameters.
    'state_grad_norm' [L + 1]: |dL/dx| over the T x D numbers of what enters layer 1, ..., L, and leaves the last.
    'taylor', 'attn_taylor', 'mlp_taylor' [L]: |theta . g|, nats: the change of a sequence's loss, to first order,
    without these parameters (root of the joint importance of Molchanov et al., arXiv 1906.10771).
    'theta_grad', 'attn_theta_grad', 'mlp_theta_grad' [L]: theta . g with its sign, which sequences may cancel: the
    exact derivative of the loss over all tokens by the logarithm of a factor on all these parameters.
    'attn_stable_rank', 'mlp_stable_rank' [L]: |g|_F^2 / |g|_2^2 of the gradients of q, k, v, o (heads side by side) and
    of gate, up, down, averaged over those that are not zero.
    'grad_norm_thirds', 'taylor_thirds' [3]: shares in the sum over all layers, see `thirds`.

  Raises:
    UserError: no batch, no weighed target, matrices of 8 bits, or weights, losses or gradients that are not finite
      (naming the tensor).
  """
  if any(map(param.is_quantised, jax.tree.leaves(params['layers'], is_leaf=param.is_quantised))):
    raise UserError('there are no gradients by int8 matrices; measure the model as it was before.')
  params = layout.stack(params, config)
  means = collections.defaultdict(lambda: Mean(seed))
  for batch in batches:
    batch = {k: batch[k] for k in (*INPUTS, 'targets', 'labels') if k in batch}
    losses_B, w_B, top_B, found = jax.device_get(_passes(config, params, batch))
    _check(config, params, losses_B, found, means['grad_norm'].sequences)
    for name, (values, weights) in _rows(found, top_B, w_B).items():
      weights = np.broadcast_to(weights.reshape(len(values), -1), values.shape)
      means[name].add(values * weights, weights)
  if not means:
    raise UserError('there are no batches to measure on.')
  if not means['grad_norm'].tokens:
    raise UserError('there is no loss to differentiate: every target is masked.')
  shares = {f'{name}_thirds': means[name].estimate(thirds) for name in ('grad_norm', 'taylor')}
  return {name: mean.estimate() for name, mean in means.items()} | shares
