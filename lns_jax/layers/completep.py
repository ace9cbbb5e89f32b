"""CompleteP (arXiv 2505.01618, table 1): how start, rate, epsilon and decay follow from width and depth.

With m_N = d_model / base_width, m_L = depth / base_depth and the branch factor m_L^-alpha of `schemes`:

  parameters                    std of the start   rate                     epsilon             decay
  matrices in blocks            m_N^(-1/2)         m_N^-1 m_L^(alpha - 1)   m_N^-1 m_L^-alpha   m_N
  gains and biases in blocks                       m_L^(alpha - 1)          m_N^-1 m_L^-alpha
  embedding, head, final norm                                               m_N^-1

and the head's input is multiplied by m_N^-1. A leaf like `schemes`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Multipliers:
  """What a group of parameters makes of the optimizer's settings."""

  lr: float = 1.0
  eps: float = 1.0
  decay: float = 1.0


def width(c) -> float:
  """m_N."""
  return c.d_model / (c.base_width or c.d_model)


def multipliers(group: str, c) -> Multipliers:
  """Of 'matrix' and 'vector' (inside blocks) and 'outer' (outside)."""
  m_N, m_L, alpha = width(c), c.depth / c.base_depth, c.completep_alpha
  return {
      'matrix': Multipliers(m_L ** (alpha - 1) / m_N, m_L ** -alpha / m_N, m_N),
      'vector': Multipliers(m_L ** (alpha - 1), m_L ** -alpha / m_N),
      'outer': Multipliers(eps=1 / m_N),
  }[group]
