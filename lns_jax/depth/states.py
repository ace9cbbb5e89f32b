"""Measures of the residual stream and of what is added to it, in one pass: variance, angles, ratios, cosines."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.depth import effective, finite
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.errors import UserError
from lns_jax.layers import schemes
from lns_jax.layers.norms import wide
from lns_jax.models import layout, transformer


# What a model reads of a batch, and which of it is padding (of images the weights say).
INPUTS = ('tokens', 'segment_ids', 'token_types', 'images', 'weights', 'patches', 'coordinates', 'windows')


def keys_of(seed, first, B: int) -> jax.Array:
  """A key for each sequence, by its number in the whole sample: no draw depends on the size of batches."""
  return jax.vmap(lambda n: jax.random.fold_in(jax.random.key(seed), n))(first + jnp.arange(B))


def unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(x / |x| along the last axis, whether |x| > 0), in float32 or wider; a zero vector stays zero."""
  x = x.astype(wide(x))
  largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
  valid = largest > 0
  x = x / jnp.where(valid, largest, 1)  # no overflow of the square, whatever the size
  return x / jnp.where(valid, jnp.linalg.norm(x, axis=-1, keepdims=True), 1), valid[..., 0]


def distance(u: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(angular distance in [0, 1], 1 - cosine) of unit vectors, exact at 0 and at 1.

  (1/pi) arccos(u.v) of paper eq. 1, computed as (2/pi) atan2(|u - v|, |u + v|): small angles keep their
  relative accuracy, where the arccos of a rounded cosine is wrong by 3e-4 or NaN.
  """
  apart, together = jnp.linalg.norm(u - v, axis=-1), jnp.linalg.norm(u + v, axis=-1)
  return 2 / jnp.pi * jnp.arctan2(apart, together), jnp.square(apart) / 2


def hidden_variance(x: jax.Array) -> jax.Array:
  """Variance over the last axis (population, ddof 0), in float32 or wider: a square overflows in float16."""
  return jnp.var(x.astype(wide(x)), axis=-1)


def all_pairs(states: jax.Array, mask_BT: jax.Array):
  """Sums over the tokens of each sequence, for all pairs of states.

  Args:
    states: [S, B, T, D]. mask_BT: 1 on tokens that count.

  Returns:
    angles, influences, counts: [B, S - 1, S]; entry [:, n - 1, i] belongs to states i and i + n, and is 0
    where i + n >= S. A pair with a zero vector is left out of all three.
  """
  units, valid = unit(states)
  S = states.shape[0]
  def shifted(n):
    far, both = jnp.roll(units, -n, axis=0), valid & jnp.roll(valid, -n, axis=0)
    inside = (jnp.arange(S) + n < S)[:, None, None]
    w = mask_BT * both * inside
    angle, influence = distance(units, far)
    return tuple(jnp.sum(v * w, axis=-1).T for v in (angle, influence, jnp.ones_like(angle)))
  return tuple(jnp.swapaxes(v, 0, 1) for v in jax.lax.map(shifted, jnp.arange(1, S)))


def _added(out):
  """A `transformer.Read`: of each token what sub-layers add to it, beside the stream itself.

  Keeps 'out' [B, T, D], and [B, T] each: '{sub}_branch' and '{sub}_skip', mean squares; '{name}_cosine' and
  '{name}_count', the cosine of what attn and mlp add with what they add to (a x), and of what the layer as a whole
  changes (leaves less enters) with what enters it, and whether it is defined; 0 where it is not.
  """
  if 'attn_x' not in out:
    return {'out': out['out']}
  kept, entered = {'out': out['out']}, out['attn_x']
  pairs = {sub: (out[f'{sub}_branch'], out[f'{sub}_skip']) for sub in schemes.SUBLAYERS}
  changed = out['out'].astype(wide(entered)) - entered.astype(wide(entered))
  for name, (added, stream) in (pairs | {'layer': (changed, entered)}).items():
    (u, some), (v, other) = unit(added), unit(stream)
    kept |= {f'{name}_cosine': jnp.sum(u * v, axis=-1), f'{name}_count': some & other}
  for sub, both in pairs.items():
    for name, x in zip((f'{sub}_branch', f'{sub}_skip'), both):
      kept[name] = jnp.mean(jnp.square(x.astype(wide(x))), axis=-1)
  return kept


TOKENS = ('all', 'last')


def counted(config: ModelConfig, batch, tokens: str, cls: bool) -> jax.Array:
  """[B, T] float32, 1 on tokens that count: every real one, or the last real one of each row."""
  mask_BT = transformer.family(config).real_tokens(config, batch)
  if not cls and config.has_cls:
    mask_BT = mask_BT.at[:, 0].set(0)
  if tokens == 'last':
    ahead = jnp.cumsum(mask_BT[:, ::-1], axis=1)[:, ::-1]
    mask_BT = mask_BT * (ahead == 1)
  return mask_BT


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _sums(config: ModelConfig, params, batch, tokens: str, cls: bool):
  mask_BT = counted(config, batch, tokens, cls)
  _, kept = transformer.stream(config, params, transformer.inputs(config, batch), read=_added,
                               **transformer.placement(batch))
  layers = layout.joined(kept['layers'])
  states = jnp.concatenate([kept['embed']['out'][None], layers.pop('out')])
  angles, influences, counts = all_pairs(states, mask_BT)
  return {**{name: jnp.sum(mask_BT * v, axis=-1).T for name, v in layers.items()},
          'variance': jnp.sum(hidden_variance(states) * mask_BT, axis=-1).T, 'tokens': jnp.sum(mask_BT, axis=-1),
          'angles': angles, 'influences': influences, 'counts': counts, 'bad': finite.first_bad(states, mask_BT)}


def means(config: ModelConfig, params, batches, *, tokens: str = 'all', cls: bool = True, seed: int = 0) -> dict[str, Mean]:
  """What `profile` is made of, with its replicates; of ratios the mean is of squares."""
  if tokens not in TOKENS:
    raise UserError(f"tokens is {tokens!r}; it is one of {', '.join(TOKENS)}.")
  found = collections.defaultdict(lambda: Mean(seed))
  for batch in batches:
    batch = {k: batch[k] for k in INPUTS if k in batch}
    sums = jax.device_get(_sums(config, params, batch, tokens, cls))
    finite.check(config, params, sums['bad'], found['variance'].sequences)
    L = config.num_layers
    found['variance'].add(sums['variance'], sums['tokens'])
    found['angular'].add(sums['angles'][:, :, :-1], sums['counts'][:, :, :-1])
    found['block_influence'].add(sums['influences'][:, 0, :-1], sums['counts'][:, 0, :-1])
    pairs = sums['tokens'] * (L * (L + 1) / 2)
    found['zero_vectors'].add(pairs - np.sum(sums['counts'], axis=(1, 2)), pairs)
    for sub in schemes.SUBLAYERS:
      found[f'{sub}_ratio'].add(sums[f'{sub}_branch'], sums[f'{sub}_skip'])
    for name in (*schemes.SUBLAYERS, 'layer'):
      found[f'{name}_cosine'].add(sums[f'{name}_cosine'], sums[f'{name}_count'])
  if not found['variance'].sequences:
    raise UserError('there are no batches to measure on.')
  if not found['angular'].tokens:
    raise UserError('no valid tokens: every state is padding or a zero vector.')
  return found


def profile(config: ModelConfig, params, batches, *, tokens: str = 'all', cls: bool = True,
            seed: int = 0) -> dict[str, Estimate]:
  """All state measures in one forward pass over the batches.

  Args:
    tokens: 'all': every real token counts (the paper); 'last': the last real one of each row (its code, and Gromov et
      al., arXiv 2403.17887).
    cls: whether the CLS token counts where the model has one. It is no patch of the image: curves with and without
      it differ, and a model of text has none.

  Returns:
    'variance' [L + 1]: over the D hidden units of a token (ddof 0), averaged over tokens; the embedding first.
    'angular' [L, L]: entry [n - 1, l - 1] is d(x^l, x^(l + n)) of paper eq. 1, averaged over tokens; x^l is
    what enters layer l, x^(L + 1) what leaves the last; NaN where l + n > L + 1.
    'block_influence' [L]: 1 - cosine of what enters and leaves each layer (ShortGPT, arXiv 2403.03853).
    'attn_ratio', 'mlp_ratio' [L]: root mean square of what the sub-layer adds, over that of what it adds to (a x).
    'attn_cosine', 'mlp_cosine' [L]: cosine of what is added with what it is added to; 'layer_cosine' [L]: of what
    leaves the layer less what enters it, with what enters it (Csordas et al., arXiv 2505.13898).
    'effective_depth_cosine', 'effective_ratio_cosine' []: of the mean of the three cosines, see `effective`.
    'zero_vectors' []: share of pairs of a token's states left out because one is the zero vector.

  Raises:
    UserError: no batch, no token with a non-zero state, or a state that is not finite (see `finite`).
  """
  found = means(config, params, batches, tokens=tokens, cls=cls, seed=seed)
  root = lambda name: np.sqrt if name.endswith('_ratio') else lambda each: each
  estimates = {name: mean.estimate(root(name)) for name, mean in found.items()}
  cosine = np.mean([found[f'{name}_cosine'].each() for name in (*schemes.SUBLAYERS, 'layer')], axis=0)
  return estimates | effective.estimates('cosine', effective.by_cosine(cosine), config.num_layers,
                                         found['layer_cosine'].tokens)


def variance(config: ModelConfig, params, batches, **kwargs) -> Estimate:
  """Output variance [L + 1], see `profile`."""
  return profile(config, params, batches, **kwargs)['variance']


def angular(config: ModelConfig, params, batches, **kwargs) -> Estimate:
  """Angular distances [L, L], see `profile`."""
  return profile(config, params, batches, **kwargs)['angular']


def block_influence(config: ModelConfig, params, batches, **kwargs) -> Estimate:
  """Block influence [L], see `profile`."""
  return profile(config, params, batches, **kwargs)['block_influence']
