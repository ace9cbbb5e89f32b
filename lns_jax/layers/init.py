"""Initialisations by name (paper.md 3.1, Table 6). A leaf like `schemes`: numbers in, standard deviations out.

The role of a matrix decides its standard deviation: `embed`, `head`, `in` (q, k, gate, up), `value`
(v) and `out` (attention output, MLP down: what writes to the residual stream).
"""

import dataclasses
import math

STD = 0.02  # every linear layer of the authors' code
PAPER_EMBED_STD = math.sqrt(2 / 5)  # 0.632: the authors' embedding until January 2026, so in all published numbers


@dataclasses.dataclass(frozen=True)
class Init:
  """Standard deviation of the embedding, and how the matrices that write to the stream shrink.

  Attributes:
    embed_std: of the token embedding; None: as every matrix.
    out_scale: (l, L) -> factor on the std of `out` matrices.
    xavier: Xavier-normal by fan in and out instead of a fixed std; `out_scale` then is the gain of
      v, out, and every MLP matrix (DeepNorm).
    depth_scaled: whether it shrinks branches with depth: fights with LNS (paper Table 6, 25.80 against 25.76).
  """

  embed_std: float | None = None
  out_scale: object = lambda l, L: 1.0
  xavier: bool = False
  depth_scaled: bool = False


INITS = {
    'paper': Init(embed_std=PAPER_EMBED_STD),
    'normal': Init(),
    'head': Init(),  # the authors' code today is the plain normal 0.02
    'scaled': Init(out_scale=lambda l, L: (2 * L) ** -0.5, depth_scaled=True),
    'depth_scaled': Init(out_scale=lambda l, L: (2 * l) ** -0.5, depth_scaled=True),
    'deepnorm': Init(out_scale=lambda l, L: (8 * L) ** -0.25, xavier=True),
}


def std(init: str, base: float, role: str, l: int, L: int, fan_in: int, fan_out: int) -> float:
  """Standard deviation of a normal draw for a matrix of the given role in layer l of L; `base` is that of plain ones."""
  i = INITS[init]
  if role == 'embed':
    return i.embed_std or base
  if not i.xavier:
    return base * (i.out_scale(l, L) if role == 'out' else 1.0)
  gain = i.out_scale(l, L) if role in ('value', 'mlp_in', 'out') else 1.0
  return gain * math.sqrt(2 / (fan_in + fan_out))
