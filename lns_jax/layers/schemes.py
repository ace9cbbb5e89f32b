"""The table of norm placements: every scheme is a row of one equation.

For a sub-layer f in {attn, mlp} of layer l = 1..L a block computes

    y = post * out_norm( a * x + b * res_norm( f( s * in_norm( c * x ) ) ) )

An absent norm is the identity. `a, b, c, s, post` are functions of the `Site` that return a Python float, so that
they are literals of the compiled program; or `Learned`, `Ramp`, `Gate`, whose constant part is such a float. A new
scheme is one row of `SCHEMES` (docs/add_a_scheme.md does one).

This module is a leaf: it knows nothing of configs or arrays, so that `lns_jax.config` can check names.
"""

import dataclasses
import math
import typing
from collections.abc import Callable


class Site(typing.NamedTuple):
  """Where a factor is evaluated."""

  l: int  # the layer's own index, 1..L
  L: int  # depth of the original model
  p: float  # exponent of the sub-layer, model.p_attn or model.p_mlp
  config: typing.Any  # the model's settings, a `config.ModelConfig`


Factor = Callable[[Site], float]


def one(at: Site) -> float:
  """No factor at all: a multiplication by 1.0 is never emitted."""
  return 1.0


@dataclasses.dataclass(frozen=True)
class Learned:
  """A factor that training moves: `beside` times a float32 parameter that starts at `start`.

  One a sub-layer; a scalar, or a vector [D] where `per_channel`.
  """

  start: Factor = one
  per_channel: bool = False
  beside: Factor = one


@dataclasses.dataclass(frozen=True)
class Ramp:
  """A factor that grows with the number t of finished updates: min(t * rate, 1). A finished model has 1."""

  rate: Factor


@dataclasses.dataclass(frozen=True)
class Gate:
  """`post` as z - SiLU(g) * stop_gradient(z), with one learned g a layer that starts at 0 (GPAS, arXiv 2506.22049)."""


Entry = Factor | Learned | Ramp | Gate


def constant(entry: Entry, at: Site) -> float:
  """The part of a factor that is known when the program is compiled."""
  match entry:
    case Learned(beside=beside):
      return beside(at)
    case Ramp(rate=rate):
      return rate(at)
    case Gate():
      return 1.0
  return entry(at)


def power(at: Site) -> float:
  """l^-p; p = 1/2 is LayerNorm Scaling (paper eq. 12)."""
  return float(at.l) ** -at.p


def stabilised(at: Site) -> float:
  """(max(i, 1) + 1e-3)^-p of the second seed, i = l - 1 its 0-based index: layers 1 and 2 get the same factor."""
  return (max(at.l - 1, 1) + 1e-3) ** -at.p


def deepnorm_alpha(at: Site) -> float:
  """(2L)^(1/4), DeepNet (arXiv 2203.00555), decoder only. Not the 2.8284 that is right for L = 32 alone."""
  return (2 * at.L) ** 0.25


def cait_start(at: Site) -> float:
  """Start of LayerScale by depth: 0.1 to 18 layers, 1e-5 to 24, 1e-6 beyond (CaiT, arXiv 2103.17239, section 4)."""
  return at.config.layerscale_init or (0.1 if at.L <= 18 else 1e-5 if at.L <= 24 else 1e-6)


def prores_rate(at: Site) -> float:
  """1 / (T l): layer l is whole after T l updates (ProRes, arXiv 2603.05369)."""
  return 1 / (at.config.prores_steps * at.l)


def completep_branch(at: Site) -> float:
  """(L / L0)^-alpha (CompleteP, arXiv 2505.01618, table 1); alpha = 1/2 is depth-muP."""
  return (at.L / at.config.base_depth) ** -at.config.completep_alpha


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of the table: which norms exist, and the five factors.

  Attributes:
    in_norm, res_norm, out_norm: whether the norm exists (None of them: a plain residual block).
    a: factor on the residual stream. b: on the branch. c: before the norm. s: on the input norm's
      output. post: on the result.
    in_gain: where the gain of the input norm starts.
    in_groups: whether the input norm takes its statistics over model.norm_groups groups of channels.
    embed_norm: whether the embedding is normalised too (Peri-LN).
    init: the initialisation of the blocks' matrices that belongs to the scheme, whatever model.init says.
    profiled: whether learned `a` start from the branches' variance on a batch (Admin).
    completep: whether widths, rates, epsilons and decay follow `lns_jax.layers.completep`.
  """

  in_norm: bool = False
  res_norm: bool = False
  out_norm: bool = False
  a: Entry = one
  b: Entry = one
  c: Entry = one
  s: Entry = one
  post: Entry = one
  in_gain: Factor = one
  in_groups: bool = False
  embed_norm: bool = False
  init: str = ''
  profiled: bool = False
  completep: bool = False

  def __post_init__(self):
    if any(isinstance(getattr(self, f), Gate) for f in 'abcs'):
      raise TypeError('a Gate acts on the result of a block: it can only be `post`.')


def mix_layers(L: int, c) -> int:
  """Number of Post-LN layers at the bottom of a Mix-LN model: a count, or floor(fraction * L) (arXiv 2412.13795)."""
  return c.mix_count if c.mix_count >= 0 else math.floor(c.mix_fraction * L + 1e-9)


PRE, POST = Row(in_norm=True), Row(out_norm=True)
# Post-LN around Pre-LN with the stream amplified. Its first block is Pre-LN in the public port; the source leaves
# alpha open: a setting, L where it is 0.
KEEL = Row(in_norm=True, out_norm=True, a=lambda at: at.config.keel_alpha or float(at.L))

SCHEMES: dict[str, Row | Callable[[Site], Row]] = {
    'pre': PRE,
    'post': POST,
    'lns': Row(in_norm=True, s=power),
    'lns_init': Row(in_norm=True, in_gain=power),
    'lns_learned': Row(in_norm=True, s=Learned(start=lambda at: at.config.alpha_init, beside=power)),
    'lns_stabilised': Row(in_norm=True, s=stabilised),
    'branch_lns': Row(in_norm=True, b=power),
    'lns_before': Row(in_norm=True, c=power),
    'lns_after_sum': Row(in_norm=True, post=power),
    'res_norm': Row(res_norm=True),
    'res_norm_lns': Row(res_norm=True, b=power),
    'sandwich': Row(in_norm=True, res_norm=True),
    'peri': Row(in_norm=True, res_norm=True, embed_norm=True),
    'deepnorm': Row(out_norm=True, a=deepnorm_alpha, init='deepnorm'),
    # Post-LN below, Pre-LN above.
    'mix': lambda at: POST if at.l <= mix_layers(at.L, at.config) else PRE,
    'layerscale': Row(in_norm=True, b=Learned(start=cait_start, per_channel=True)),
    'skipinit': Row(in_norm=True, b=Learned(start=lambda at: at.L ** -0.5)),
    'rezero': Row(in_norm=True, b=Learned(start=lambda at: 0.0)),
    'admin': Row(out_norm=True, a=Learned(per_channel=True), profiled=True),
    'group_ln': Row(in_norm=True, in_groups=True),
    'gpas': Row(in_norm=True, post=Gate()),
    'keel': lambda at: PRE if at.l == 1 else KEEL,
    'prores': Row(in_norm=True, b=Ramp(prores_rate)),
    'completep': Row(in_norm=True, b=completep_branch, completep=True),
}

SUBLAYERS = ('attn', 'mlp')


@dataclasses.dataclass(frozen=True)
class Factors:
  """The constant parts of the five factors of one sub-layer: Python floats (or fp32 scalars inside a scan)."""

  a: float
  b: float
  c: float
  s: float
  post: float


FACTORS = tuple(f.name for f in dataclasses.fields(Factors))
GATE = 'stream_gate'
# Names of learned factors among a block's parameters, by which the optimizer knows them.
LEARNED = {GATE, *(f'{sub}_{f}' for sub in SUBLAYERS for f in FACTORS)}


def row(c, l: int) -> Row:
  """The row that layer l of a model with settings c obeys."""
  entry = SCHEMES[c.scheme]
  return entry if isinstance(entry, Row) else entry(site(c, l, 'attn'))


def has(c, attribute: str) -> bool:
  """Whether a row of the model's layers has a boolean attribute."""
  return any(getattr(row(c, l), attribute) for l in c.layer_ids)


def grows(c) -> bool:
  """Whether a factor of the scheme changes with the step."""
  return any(isinstance(getattr(row(c, l), f), Ramp) for l in c.layer_ids for f in FACTORS)


def learns(c) -> bool:
  """Whether a factor of the scheme is learned."""
  return any(isinstance(getattr(row(c, l), f), Learned | Gate) for l in c.layer_ids for f in FACTORS)


def site(c, l: int, sub: str) -> Site:
  """The site of a sub-layer of layer l."""
  return Site(l, c.depth, c.p_attn if sub == 'attn' else c.p_mlp, c)


def factors(c, l: int) -> dict[str, Factors]:
  """The constants of both sub-layers of layer l."""
  r = row(c, l)
  return {sub: Factors(*(constant(getattr(r, f), site(c, l, sub)) for f in FACTORS)) for sub in SUBLAYERS}
