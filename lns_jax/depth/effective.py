"""Effective depth: the layer where a model stops to compose and only refines, by three curves over depth.

The definitions are those of Hu et al. (arXiv 2512.14064, their code), after Csordas et al. (arXiv 2505.13898). A depth
is the 1-based number, counted among the L layers that the model has, of the layer found; over L it is their ratio. A
state is counted by the layer that it enters: the embedding by layer 1, what layer l - 1 leaves by layer l; what leaves
the last layer is the prediction itself and takes no part. NaN: no layer is found.

Two things differ: a search here ends at what enters layer L, theirs one state earlier; and where theirs finds nothing
it returns the index -1, a ratio of 0, for the curves of the logit lens.
"""

import numpy as np

from lns_jax.depth.estimate import Estimate

# What their published numbers use; the defaults of their functions are 0.1 and 0.2.
KL_SHARE, OVERLAP = 0.5, 0.3


def by_cosine(cosine: np.ndarray) -> np.ndarray:
  """[..., L] -> [...]: the last layer with a negative cosine whose next one's is not.

  cosine: mean of those of attention, MLP and whole layer with the stream that they add to, see `states.profile`.
  Before that layer the stream is still erased, behind it what it holds is amplified.
  """
  turns = (cosine[..., :-1] < 0) & (cosine[..., 1:] >= 0)
  return _numbered(turns, turns.shape[-1] - 1 - np.argmax(turns[..., ::-1], axis=-1) if turns.shape[-1] else 0)


def by_kl(kl: np.ndarray, share: float = KL_SHARE) -> np.ndarray:
  """[..., L + 1] -> [...]: the first layer that is entered by a state with less than `share` of the largest KL.

  kl: KL(lens || final) of the states, see `lens.logit_lens`.
  """
  near = kl[..., :-1] < share * np.max(kl, axis=-1, keepdims=True)
  return _numbered(near, np.argmax(near, axis=-1))


def by_overlap(overlap: np.ndarray, least: float = OVERLAP) -> np.ndarray:
  """[..., L + 1] -> [...]: the first layer that is entered by a state with a top-5 overlap above `least`."""
  near = overlap[..., :-1] > least
  return _numbered(near, np.argmax(near, axis=-1))


def _numbered(found: np.ndarray, position) -> np.ndarray:
  return np.where(found.any(axis=-1), position + 1.0, np.nan)


def estimates(name: str, each: np.ndarray, L: int, tokens: float) -> dict[str, Estimate]:
  """'effective_depth_NAME' and 'effective_ratio_NAME' [] of a depth and its replicates [1 + REPLICATES].

  The interval is that of the replicates in which a layer is found.
  """
  return {f'effective_depth_{name}': Estimate.of(each, tokens),
          f'effective_ratio_{name}': Estimate.of(each / L, tokens)}
