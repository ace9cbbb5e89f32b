"""Per-layer statistics of a training step, as sums over tokens so that micro-batches and devices add up."""

import jax
import jax.numpy as jnp

from lns_jax.layers.norms import wide
from lns_jax.models import by_layer


def reader(weights_BT: jax.Array):
  """A `transformer.Read` that keeps summed statistics of one block.

  'variance': over the D hidden units of a token (population, ddof 0), of the stream that leaves the block.
  '{sub}_branch', '{sub}_skip': mean square of what the sub-layer adds, and of what it is added to (a x).
  """
  def over_tokens(values_BT):
    return jnp.sum(values_BT * weights_BT)

  def mean_square(x):
    return over_tokens(jnp.mean(jnp.square(x.astype(wide(x))), axis=-1))

  def read(out):
    x = out['out'].astype(wide(out['out']))
    kept = {'variance': over_tokens(jnp.var(x, axis=-1))}
    return kept | {name: mean_square(v) for name, v in out.items() if name.endswith(('_branch', '_skip'))}
  return read


def stack(kept: dict[int, dict[str, jax.Array]]) -> dict[str, jax.Array]:
  """{0: embedding, l: layer l} -> {'variance': [L+1], every other name: [L]}."""
  names = {name for per_layer in kept.values() for name in per_layer}
  return {name: jnp.stack([v[name] for v in kept.values() if name in v]) for name in sorted(names)}


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
