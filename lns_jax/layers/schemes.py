"""The table of norm placements: every scheme is a row of one equation.

For a sub-layer f in {attn, mlp} of layer l = 1..L a block computes

    y = post * out_norm( a * x + b * res_norm( f( s * in_norm( c * x ) ) ) )

An absent norm is the identity. `a, b, c, s, post` are functions of (l, L, p) that return a Python
float, so that they are literals of the compiled program. A new scheme is one row of `SCHEMES`.

This module is a leaf: it knows nothing of configs or arrays, so that `lns_jax.config` can check names.
"""

import dataclasses
import math
from collections.abc import Callable

# (l, L, p) -> factor. l: the layer's own index, 1..L; L: depth of the original model; p: exponent.
Factor = Callable[[int, int, float], float]


def one(l: int, L: int, p: float) -> float:
  """No factor at all: a multiplication by 1.0 is never emitted."""
  return 1.0


def power(l: int, L: int, p: float) -> float:
  """l^-p; p = 1/2 is LayerNorm Scaling (paper eq. 12)."""
  return float(l) ** -p


def deepnorm_alpha(l: int, L: int, p: float) -> float:
  """(2L)^(1/4), DeepNet (arXiv 2203.00555), decoder only. Not the 2.8284 that is right for L = 32 alone."""
  return (2 * L) ** 0.25


def deepnorm_beta(l: int, L: int, p: float) -> float:
  """(8L)^(-1/4), DeepNet; the paper's code has the exponent's sign wrong (paper.md 6.3)."""
  return (8 * L) ** -0.25


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of the table: which norms exist, and the five factors.

  Attributes:
    in_norm, res_norm, out_norm: whether the norm exists (None of them: a plain residual block).
    a: factor on the residual stream. b: on the branch. c: before the norm. s: on the input norm's
      output. post: on the result.
    embed_norm: whether the embedding is normalised too (Peri-LN).
    xavier_gain: where given, blocks start Xavier-normal with this gain (see `init.xavier_std`), whatever
      model.init says of matrices.
  """

  in_norm: bool = False
  res_norm: bool = False
  out_norm: bool = False
  a: Factor = one
  b: Factor = one
  c: Factor = one
  s: Factor = one
  post: Factor = one
  embed_norm: bool = False
  xavier_gain: Factor | None = None


def mix_layers(L: int, fraction: float) -> int:
  """Number of Post-LN layers at the bottom of a Mix-LN model: floor(fraction * L) (arXiv 2412.13795)."""
  return math.floor(fraction * L)


PRE, POST = Row(in_norm=True), Row(out_norm=True)

SCHEMES: dict[str, Row | Callable[[int, int, float], Row]] = {
    'pre': PRE,
    'post': POST,
    'lns': Row(in_norm=True, s=power),
    'branch_lns': Row(in_norm=True, b=power),
    'lns_before': Row(in_norm=True, c=power),
    'lns_after_sum': Row(in_norm=True, post=power),
    'res_norm': Row(res_norm=True),
    'sandwich': Row(in_norm=True, res_norm=True),
    'peri': Row(in_norm=True, res_norm=True, embed_norm=True),
    'deepnorm': Row(out_norm=True, a=deepnorm_alpha, xavier_gain=deepnorm_beta),
    # The only row that depends on the layer: Post-LN below, Pre-LN above.
    'mix': lambda l, L, fraction: POST if l <= mix_layers(L, fraction) else PRE,
}


@dataclasses.dataclass(frozen=True)
class Factors:
  """The five factors of one sub-layer of one layer, as Python floats (or fp32 scalars inside a scan)."""

  a: float
  b: float
  c: float
  s: float
  post: float


FACTORS = tuple(f.name for f in dataclasses.fields(Factors))


def row(scheme: str, l: int, L: int, mix_fraction: float) -> Row:
  """The row that layer l of L obeys."""
  entry = SCHEMES[scheme]
  return entry if isinstance(entry, Row) else entry(l, L, mix_fraction)


def factors(r: Row, l: int, L: int, p: float) -> Factors:
  """Evaluates a row's factors at layer l of L with exponent p."""
  return Factors(*(getattr(r, f)(l, L, p) for f in FACTORS))
