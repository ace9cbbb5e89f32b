"""Per-layer statistics of a training step, as sums over tokens so that micro-batches and devices add up."""

import jax
import jax.numpy as jnp

from lns_jax.layers.norms import wide
from lns_jax.models import by_layer


def read(out: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """A `transformer.Read` that keeps statistics of one block for each token, [B, T] each.

  'variance': over the D hidden units (population, ddof 0), of the stream that leaves the block.
  '{sub}_branch', '{sub}_skip': mean square of what the sub-layer adds, and of what it is added to (a x).
  """
  mean_square = lambda x: jnp.mean(jnp.square(x.astype(wide(x))), axis=-1)
  x = out['out'].astype(wide(out['out']))
  squares = {name: mean_square(v) for name, v in out.items() if name.endswith(('_branch', '_skip'))}
  return {'variance': jnp.var(x, axis=-1)} | squares


def sums(kept: dict[int, dict[str, jax.Array]], weights_BT: jax.Array) -> dict[str, jax.Array]:
  """{0: embedding, l: layer l} as of `read` -> weighed sums: 'variance' [L+1], every other name [L]; 'tokens' []."""
  names = {name for of_layer in kept.values() for name in of_layer}
  of_layers = lambda name: jnp.stack([jnp.sum(v[name] * weights_BT) for v in kept.values() if name in v])
  return {name: of_layers(name) for name in sorted(names)} | {'tokens': jnp.sum(weights_BT)}


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
