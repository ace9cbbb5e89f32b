"""Per-layer statistics of a training step, as sums over tokens so that micro-batches and devices add up."""

import jax
import jax.numpy as jnp

from lns_jax.layers.norms import wide
from lns_jax.models import by_layer, layout


def read(out: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """A `transformer.Read` that keeps statistics of one block for each token, [B, T] each.

  'variance': over the D hidden units (population, ddof 0), of the stream that leaves the block.
  '{sub}_branch', '{sub}_skip': mean square of what the sub-layer adds, and of what it is added to (a x).
  """
  mean_square = lambda x: jnp.mean(jnp.square(x.astype(wide(x))), axis=-1)
  x = out['out'].astype(wide(out['out']))
  squares = {name: mean_square(v) for name, v in out.items() if name.endswith(('_branch', '_skip'))}
  return {'variance': jnp.var(x, axis=-1)} | squares


def sums(kept: dict[str, dict], weights_BT: jax.Array) -> dict[str, jax.Array]:
  """What `transformer.stream` kept by `read` -> weighed sums: 'variance' [L+1], every other name [L]; 'tokens' []."""
  kept = jax.tree.map(lambda v: jnp.sum(v * weights_BT, axis=(-2, -1)), kept)
  found = layout.joined(kept['layers'])
  variance = jnp.concatenate([kept['embed']['variance'][None], found['variance']])
  return found | {'variance': variance, 'tokens': jnp.sum(weights_BT)}


def finish(sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Sums, 'tokens' being their number, -> numbers per token.

  'variance' [L+1]; 'attn_ratio' and 'mlp_ratio' [L]: rms of the branch over rms of what it is added to.
  """
  ratio = lambda sub: jnp.sqrt(sums[f'{sub}_branch'] / sums[f'{sub}_skip'])
  variance = sums['variance'] / jnp.maximum(sums['tokens'], 1)
  return {'variance': variance, 'attn_ratio': ratio('attn'), 'mlp_ratio': ratio('mlp')}


def squares(grads) -> dict[str, jax.Array]:
  """Sums of squared entries: 'all', a scalar, and 'layers', [L] in the order of the layers."""
  layers, everything = by_layer.sums(jnp.square, grads)
  return {'all': everything, 'layers': layers}


def decrease(grads, updates) -> dict[str, jax.Array]:
  """-(gradient . update), the decrease of the loss that the update brings to first order; keys as of `squares`.

  'all' counts embedding, head and final norm too, so that layers / all are shares of the whole.
  """
  layers, everything = by_layer.sums(lambda g, u: -g * u, grads, updates)
  return {'all': everything, 'layers': layers}
