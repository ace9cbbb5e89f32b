"""A scheme's factors moved into the weights, and back: how an LNS model is a plain Llama to everybody else.

`fold` makes of a model the plain one with the same function: a factor s on a norm's output goes into that norm's gain
(and bias), or, where it has none, into the input rows of the projections behind it; a factor b on a branch into the
branch's last projection, or into the gain of the norm behind that. What can be folded follows from the rows of
`lns_jax.layers.schemes`: s and b can; what acts on the stream itself (a, post), before a norm, where its eps would
change (c), or is no factor cannot. `unfold` is the inverse for factors that are no parameters, `retrofit` the same step
for a checkpoint that never had any.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from absl import logging

from lns_jax import config as config_lib
from lns_jax.errors import UserError
from lns_jax.layers import completep, schemes
from lns_jax.models import layout

# The plain scheme with just this norm in every block. `post` is BERT's: there is no causal class of it.
PLAIN = {('in_norm',): 'pre', ('res_norm',): 'res_norm', ('out_norm',): 'post'}
# What acts where no weight of a plain model does.
FIXED = {'a': 'multiplies the residual stream', 'c': 'multiplies the input of a norm, beside its eps',
         'post': 'multiplies the sum of stream and branch'}
INTO = {'attn': ('q', 'k', 'v'), 'mlp': ('gate', 'up')}  # read the norm's output, D first
OUT = {'attn': ('o', 'o_bias'), 'mlp': ('down', 'down_bias')}  # write the branch, D last
EXPONENTS = ('p_attn', 'p_mlp')

Change = Callable[[np.ndarray, np.ndarray], np.ndarray]


def fold(config: config_lib.ModelConfig, params):
  """The plain model with the same function.

  Arithmetic is that of the model: factors times gains in float32, rounded once, so that RMSNorm models keep their
  float32 logits bit for bit. Leaves that take a factor become float32 (or wider, if they are).

  Args:
    config, params: a model, in either layout.

  Returns:
    (config, params, record). The config has scheme pre, res_norm or post; layers keep their ids. The record, ready for
    JSON, is what `unfold` reads: 'scheme', 'settings' of the scheme, 'layer_ids', 'depth', 'folded' {layer id:
    {leaf: factor, or 'per channel'}}, 'final' the factor of the final norm.

  Raises:
    UserError: no plain model has this function; the sentence says why, and which schemes have one.
  """
  plain = dataclasses.replace(config, **{**_defaults(), 'scheme': plain_scheme(config)})
  canonical = layout.unstack(params)
  sites = {l: _sites(config, canonical['layers'][str(l)], l) for l in config.layer_ids}
  record = {
      'scheme': config.scheme, 'settings': {name: getattr(config, name) for name in _read_by(config)},
      'layer_ids': list(config.layer_ids), 'depth': config.depth, 'final': final_factor(config),
      'folded': {str(l): {'/'.join(path): float(k) if np.ndim(k) == 0 else 'per channel' for path, k, _ in of_layer}
                 for l, of_layer in sites.items() if of_layer}}
  return plain, _changed(config, plain, canonical, sites, np.multiply), record


def unfold(config: config_lib.ModelConfig, params, record: dict):
  """The model that `fold` made a plain one, its factors outside of the weights again.

  fold(unfold(h)) is h bit for bit wherever a float32 gain gives h; a gain that none gives is off by its last bit.
  A scheme with learned factors stays plain, and a warning says so: the weights do not tell the factor from the gain.

  Args:
    config, params: the plain model, in either layout; its layers may be numbered 1..n.
    record: of `fold`.

  Returns:
    (config, params) with the ids and the depth of the record.

  Raises:
    UserError: the record does not belong to this model.
  """
  try:
    ids = dict(zip(config.layer_ids, record['layer_ids'], strict=True))
    plain = dataclasses.replace(config, layer_ids=tuple(ids.values()), depth=record['depth'],
                                window_layers=tuple(ids[l] for l in config.window_layers if l in ids))
    target = dataclasses.replace(plain, scheme=record['scheme'], **record['settings'])
  except (KeyError, TypeError, ValueError) as e:
    raise UserError(f'the record of what was folded into this model is damaged ({e}); without it, the model is a plain '
                    'one with the same function.') from None
  canonical = layout.unstack(params)
  canonical = {**canonical, 'layers': {str(new): canonical['layers'][str(old)] for old, new in ids.items()}}
  if schemes.learns(target) or schemes.grows(target):
    logging.warning('Scheme %s was folded into the weights, which do not tell its factors from the gains any more: the '
                    'model is opened as scheme %s, with the same function.', target.scheme, config.scheme)
    return plain, layout.native(canonical, plain)
  return _factored(plain, canonical, target)


def retrofit(config: config_lib.ModelConfig, params, scheme: str = 'lns'):
  """A plain model in the form of a scheme with fixed factors, its function unchanged: for lns, gains times sqrt(l).

  Trained on, its factors stay where the weights move (paper.md 6.5 says what that changes).

  Args:
    config, params: a model of scheme pre (or res_norm, post), in either layout.
    scheme: its exponents are those of the config, model.p_attn and model.p_mlp.

  Returns:
    (config, params).

  Raises:
    UserError: the scheme has no fixed factors, or has other norms than the model.
  """
  target = dataclasses.replace(config, scheme=scheme)
  if schemes.learns(target) or schemes.grows(target):
    raise UserError(f'scheme {target.scheme!r} has factors that training moves, which say nothing of an old model; '
                    "'lns' has fixed ones.")
  if config.scheme == scheme != plain_scheme(target):
    raise UserError(f'this model has scheme {scheme!r} already.')
  return _factored(config, layout.unstack(params), target)


def plain_scheme(config: config_lib.ModelConfig) -> str:
  """The plain scheme that a model's factors can be folded to. Raises UserError when there is none."""
  if config.norm == 'dyt':
    raise UserError(f'model.norm = {config.norm} is in no stock class; rmsnorm and layernorm are.')
  why = _obstacle(config)
  if why:
    raise UserError(f'model.scheme = {config.scheme} is not a plain model with other weights: it {why}; the schemes '
                    f"that are: {', '.join(_foldable(config))}.")
  return _form(config, config.layer_ids[0])


def final_factor(config: config_lib.ModelConfig) -> float:
  """What the output of the final norm is multiplied with (CompleteP)."""
  return 1 / completep.width(config) if schemes.has(config, 'completep') else 1.0


def _form(config, l: int) -> str | None:
  row = schemes.row(config, l)
  return PLAIN.get(tuple(n for n in ('in_norm', 'res_norm', 'out_norm') if getattr(row, n)))


def _obstacle(config) -> str:
  """What a model does that no plain one can, as the end of a sentence; empty: nothing."""
  forms = {_form(config, l) for l in config.layer_ids}
  if len(forms) > 1:
    return 'has blocks of more than one kind, by where their norms are'
  if None in forms:
    return 'has norms at more than one place of a branch, or at none'
  if forms == {'post'} and config.causal:
    return 'has its norm behind the sum (Post-LN), which no stock class with a causal mask has'
  for attribute, words in (('in_groups', 'takes the statistics of its norms over groups of channels'),
                           ('embed_norm', 'normalises the embedding')):
    if schemes.has(config, attribute):
      return words
  for factor, words in FIXED.items():
    if any(not _is_one(getattr(schemes.row(config, l), factor), schemes.site(config, l, sub))
           for l in config.layer_ids for sub in schemes.SUBLAYERS):
      return words
  return _without_gain(config)


def _is_one(entry: schemes.Entry, at: schemes.Site) -> bool:
  return not isinstance(entry, schemes.Learned | schemes.Ramp | schemes.Gate) and entry(at) == 1.0


def _without_gain(config) -> str:
  """As of `_obstacle`: a factor behind a norm that has no gain to take it."""
  if config.norm != 'nonparametric_layernorm':
    return ''
  if any(schemes.row(config, l).res_norm and not _is_one(schemes.row(config, l).b, schemes.site(config, l, sub))
         for l in config.layer_ids for sub in schemes.SUBLAYERS):
    return f'multiplies the output of a norm that has no gain (model.norm = {config.norm}), and nothing comes after it'
  if final_factor(config) != 1.0 and config.tie_embeddings:
    return f'multiplies the input of a tied head, and the norm before it has no gain (model.norm = {config.norm})'
  return ''


def _foldable(config) -> list[str]:
  """The schemes that a model of these settings could have and be folded."""
  def can(name):
    try:
      return not _obstacle(dataclasses.replace(config, scheme=name))
    except UserError:  # of a combination of settings that there is not
      return False
  return [name for name in schemes.SCHEMES if can(name)]


def _read_by(config) -> list[str]:
  """Names of the settings that a model's factors may follow."""
  return [*EXPONENTS, *(f.name for f in dataclasses.fields(config) if f.metadata.get('scheme') == config.scheme)]


def _defaults() -> dict:
  """Settings that only factors follow, as a plain model has them."""
  return {f.name: f.default for f in dataclasses.fields(config_lib.ModelConfig)
          if f.name in EXPONENTS or f.metadata.get('scheme')}


def _value(config, layer: dict, name: str, sub: str, l: int):
  """Factor `name` of a sub-layer, float32 (or wider) as the model has it: a scalar or [D]."""
  entry, at = getattr(schemes.row(config, l), name), schemes.site(config, l, sub)
  k = schemes.constant(entry, at)
  match entry:
    case schemes.Learned():
      learned = np.asarray(layer[f'{sub}_{name}'])
      return learned.dtype.type(k) * learned
    case schemes.Ramp():
      return np.float32(1.0 if config.ramp_step < 0 else min(config.ramp_step * k, 1.0))
  return np.float64(k)  # rounded to the type that it is multiplied in


def _sites(config, layer: dict, l: int) -> list[tuple[tuple[str, str], np.ndarray, bool]]:
  """(leaf of a layer, factor that it takes, whether D is its first axis) of every factor that is not 1."""
  row, gains, found = schemes.row(config, l), config.norm != 'nonparametric_layernorm', []
  for sub in schemes.SUBLAYERS:
    norm = lambda kind, sub=sub: [(f'{sub}_{kind}_norm', leaf) for leaf in ('gain', 'bias')]
    projections = lambda names, sub=sub: [(sub, name) for name in names]
    takes = {'s': norm('in') if row.in_norm and gains else projections(INTO[sub]),
             'b': norm('res') if row.res_norm else projections(OUT[sub])}
    for name, paths in takes.items():
      if not _is_one(getattr(row, name), schemes.site(config, l, sub)):
        k = _value(config, layer, name, sub, l)
        found += [((part, leaf), k, leaf in INTO[sub]) for part, leaf in paths if leaf in layer.get(part, {})]
  return found


def _factored(plain, canonical: dict, target):
  """A plain model's parameters in the form of `target`, whose factors are constants."""
  wanted = plain_scheme(target)
  if wanted != plain.scheme:
    raise UserError(f'scheme {target.scheme!r} is scheme {wanted!r} with factors, but this model has scheme '
                    f'{plain.scheme!r}.')
  sites = {l: _sites(target, canonical['layers'][str(l)], l) for l in target.layer_ids}
  return target, _changed(target, target, canonical, sites, preimage)


def _changed(config, result, canonical: dict, sites: dict, change: Change):
  """Parameters in the layout of `result`: leaves at the sites of the model `config` changed, learned factors gone."""
  layers = {}
  for l, of_layer in sites.items():
    layer = {k: v for k, v in canonical['layers'][str(l)].items() if k not in schemes.LEARNED}
    for (part, leaf), k, first in of_layer:
      layer[part] = {**layer[part], leaf: _apply(change, layer[part][leaf], k, first)}
    layers[str(l)] = layer
  params, k = {**canonical, 'layers': layers}, final_factor(config)
  if k != 1.0:
    part = 'final_norm' if 'final_norm' in params else 'head'
    params[part] = {leaf: _apply(change, x, np.float64(k), False) for leaf, x in params[part].items()}
  return layout.native(params, result)


def _apply(change: Change, leaf, k, first: bool):
  """change(leaf, k) where k runs over the first or the last axis; on the device where the leaf is."""
  x = np.asarray(leaf)
  x = x.astype(np.promote_types(x.dtype, np.float32))
  k = np.asarray(k).astype(x.dtype)
  found = change(x, k.reshape(-1, *[1] * (x.ndim - 1)) if k.ndim and first else k)
  return jax.device_put(found, leaf.sharding) if isinstance(leaf, jax.Array) else found


def preimage(h: np.ndarray, k: np.ndarray) -> np.ndarray:
  """g with g * k == h after rounding where there is one, else h / k.

  h, k: of the same float type. A g that gives h lies within a unit in the last place of h / k.
  """
  g = h / k
  for near in (np.nextafter(g, np.inf), np.nextafter(g, -np.inf)):
    g = np.where((g * k != h) & (near * k == h), near, g)
  return g.astype(h.dtype)

