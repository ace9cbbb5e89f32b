"""Initialisations by name (paper.md 3.1, 3.3, Table 6). A leaf like `schemes`: numbers in, distributions out.

The role of a matrix decides its standard deviation: `embed`, `head`, `in` (q, k), `value` (v), `mlp_in`
(gate, up) and `out` (attention output, MLP down: what writes to the residual stream).
"""

import dataclasses
import math
from collections.abc import Callable

STD = 0.02  # every linear layer of the authors' code
PAPER_EMBED_STD = math.sqrt(2 / 5)  # 0.632: the authors' embedding until January 2026, so in all published numbers


@dataclasses.dataclass(frozen=True)
class Matrix:
  """What is known of a matrix before it is drawn.

  l: its layer, 0 outside of the blocks. L: depth. base: model.init_std. width: d_model.
  """

  role: str
  l: int
  L: int
  base: float
  width: int
  fan_in: int
  fan_out: int


@dataclasses.dataclass(frozen=True)
class Init:
  """An initialisation: normal draws.

  Attributes:
    std: of a matrix.
    cut: standard deviations beyond which nothing is drawn; None: none. The std is that before the cut, as in OLMo.
    depth_scaled: whether branches shrink with depth: fights with LNS (paper Table 6, 25.80 against 25.76).
    knows_width: whether the std of blocks follows from their widths.
  """

  std: Callable[[Matrix], float]
  cut: float | None = None
  depth_scaled: bool = False
  knows_width: bool = False


def paper(m: Matrix) -> float:
  """The authors' code until January 2026: embedding 0.632, all else 0.02."""
  return PAPER_EMBED_STD if m.role == 'embed' else m.base


def head(m: Matrix) -> float:
  """The authors' code since: 0.02 everywhere, as the plain normal."""
  return m.base


def scaled(m: Matrix) -> float:
  """1 / sqrt(2L) on what writes to the stream (GPT-2, Megatron)."""
  return m.base * ((2 * m.L) ** -0.5 if m.role == 'out' else 1.0)


def depth_scaled(m: Matrix) -> float:
  """1 / sqrt(2l) on what writes to the stream (arXiv 1908.11365)."""
  return m.base * ((2 * m.l) ** -0.5 if m.role == 'out' else 1.0)


def mitchell(m: Matrix) -> float:
  """OLMo: 1 / sqrt(D), and 1 / sqrt(2 l fan_in) on what writes to the stream."""
  return (2 * m.l * m.fan_in) ** -0.5 if m.role == 'out' else m.width ** -0.5


def deepnorm(m: Matrix) -> float:
  """Xavier-normal, with gain (8L)^(-1/4) on v, o and the MLP and 1 on q and k (DeepNet, arXiv 2203.00555, figure 2).

  The paper's code has the exponent's sign wrong (paper.md 6.3).
  """
  if m.role in ('embed', 'head'):
    return m.base
  gain = (8 * m.L) ** -0.25 if m.role in ('value', 'mlp_in', 'out') else 1.0
  return gain * math.sqrt(2 / (m.fan_in + m.fan_out))


INITS = {
    'paper': Init(paper),
    'normal': Init(head),
    'head': Init(head),
    'truncated': Init(head, cut=3.0),
    'scaled': Init(scaled, depth_scaled=True),
    'depth_scaled': Init(depth_scaled, depth_scaled=True),
    'mitchell': Init(mitchell, cut=3.0, depth_scaled=True, knows_width=True),
    'deepnorm': Init(deepnorm, knows_width=True),
}
