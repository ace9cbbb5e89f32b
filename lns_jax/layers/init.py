"""Initialisations by name (paper.md 3.1, Table 6). A leaf like `schemes`: numbers in, standard deviations out.

The role of a matrix decides its standard deviation: `embed`, `head`, `in` (q, k), `value` (v), `mlp_in`
(gate, up) and `out` (attention output, MLP down: what writes to the residual stream).
"""

import dataclasses
import math
from collections.abc import Callable

STD = 0.02  # every linear layer of the authors' code
PAPER_EMBED_STD = math.sqrt(2 / 5)  # 0.632: the authors' embedding until January 2026, so in all published numbers


@dataclasses.dataclass(frozen=True)
class Init:
  """Standard deviation of the embedding, and how the matrices that write to the stream shrink.

  Attributes:
    embed_std: of the token embedding; None: as every matrix.
    out_scale: (l, L) -> factor on the std of `out` matrices.
    depth_scaled: whether branches shrink with depth: fights with LNS (paper Table 6, 25.80 against 25.76).
  """

  embed_std: float | None = None
  out_scale: Callable[[int, int], float] = lambda l, L: 1.0
  depth_scaled: bool = False


INITS = {
    'paper': Init(embed_std=PAPER_EMBED_STD),
    'normal': Init(),
    'head': Init(),  # the authors' code today is the plain normal 0.02
    'scaled': Init(out_scale=lambda l, L: (2 * L) ** -0.5, depth_scaled=True),
    'depth_scaled': Init(out_scale=lambda l, L: (2 * l) ** -0.5, depth_scaled=True),
}


def std(init: str, base: float, role: str, l: int, L: int) -> float:
  """Standard deviation of a normal draw for a matrix of a role in layer l of L; `base` is that of plain ones."""
  if role == 'embed':
    return INITS[init].embed_std or base
  return base * (INITS[init].out_scale(l, L) if role == 'out' else 1.0)


def xavier_std(gain: float, role: str, fan_in: int, fan_out: int) -> float:
  """Xavier-normal with a gain on v, o and the MLP matrices, and 1 on q and k (DeepNet, arXiv 2203.00555, figure 2)."""
  return (gain if role in ('value', 'mlp_in', 'out') else 1.0) * math.sqrt(2 / (fan_in + fan_out))
