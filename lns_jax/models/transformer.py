"""A model: input, blocks, final norm, head, as pure functions of (config, params, input).

The families differ in what lies before and behind the blocks, and in nothing else: each is a module (`decoder`,
`vit`, `encoder`, `tower`) with the same functions, which `family` finds.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from fnmatch import fnmatch

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import config as config_lib
from lns_jax import mesh
from lns_jax.errors import UserError
from lns_jax.layers import attention, block, completep, param, schemes
from lns_jax.layers.norms import Norm, times, wide
from lns_jax.models import decoder, encoder, layout, loop, pipeline, tower, vit

# From a block's `out` to what the caller wants of it, rows first; called inside the loop over layers, where the stages
# of a pipeline see a part of the rows.
Read = Callable[[dict[str, jax.Array]], dict[str, jax.Array]]

STREAM = ('batch', 'seq', 'stream')  # logical axes of x_BTD
# Numbers of the draws outside of the blocks: a twin with a part more keeps the draws of the others.
DRAWS = ('embed', 'final_norm', 'head', 'embed_norm', 'positions')


FAMILIES = {'decoder': decoder, 'vit': vit, 'encoder': encoder, 'tower': tower}


def family(config: config_lib.ModelConfig):
  """The module that knows the ends of the model."""
  return FAMILIES[config.family]


def inputs(config: config_lib.ModelConfig, batch: Mapping[str, jax.Array]) -> jax.Array:
  """What the model reads of a batch, with 'token_types' where it has them, as of `typed`.

  Raises UserError when the batch has none of it.
  """
  name = family(config).INPUT
  if name not in batch:
    raise UserError(f'a model of family {config.family} reads {name!r}, but the batch has {sorted(batch)}.')
  return typed(config, batch[name], batch.get('token_types'))


def typed(config: config_lib.ModelConfig, tokens: jax.Array, token_types: jax.Array | None):
  """tokens, or `encoder.Typed` with their types. Raises UserError for types of a model that has none."""
  if token_types is None:
    return tokens
  if config.family != 'encoder':
    raise UserError(f'token_types belong to model.family = encoder; a model of family {config.family} takes none.')
  return encoder.Typed(tokens, token_types)


def placement(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """What a batch says of where tokens stand and which see each other, as keywords of `attention.context`."""
  return {name: batch[name] for name in ('segment_ids', 'coordinates', 'windows') if name in batch}


def _modules(config: config_lib.ModelConfig) -> dict[str, tuple[nn.Module, tuple]]:
  """Everything outside the blocks, with the arguments that initialise it."""
  x = jnp.zeros((1, 1, config.d_model), param.dtypes(config)[1])
  norms = ['final_norm'] * config.has_final_norm + ['embed_norm'] * config.has_embed_norm
  return {name: (Norm(config), (x,)) for name in norms} | {n: (m, ()) for n, m in family(config).ends(config).items()}


def boxed_init(config: config_lib.ModelConfig, rng: jax.Array):
  """Parameters of one layer of each run, under its canonical name, and of all outside; in boxes with logical axes."""
  rng_outer, rng_layers = jax.random.split(rng)
  layers = {str(run[0]): _draw(config, rng_layers, run) for run in layout.runs(config)}
  return _outside(config, rng_outer) | {'layers': layers}


def _outside(config: config_lib.ModelConfig, rng: jax.Array):
  params = {}
  for name, (module, args) in _modules(config).items():
    found = module.init(jax.random.fold_in(rng, DRAWS.index(name)), *args).get('params')
    params |= {name: found} if found else {}  # a norm may have none
  return params


def _draw(config: config_lib.ModelConfig, rng: jax.Array, run: layout.Run, position=0):
  """Boxed parameters of the layer at a position of a run, which may be traced: its draw depends on its id alone.

  So a model with layers removed or added keeps the draws of the others.
  """
  x = jnp.zeros((1, 1, config.d_model), param.dtypes(config)[1])
  which = {param.DRAWN: {'ids': np.array(run), 'position': position}}
  rng = jax.random.fold_in(rng, jnp.array(run)[position])
  _, drawn = block.Block(config).apply(
      which, x, attention.context(config, x, None), run[0], rngs={'params': rng}, mutable=['params'])
  return drawn['params']


def init(config: config_lib.ModelConfig, rng: jax.Array, batch: Mapping[str, jax.Array] | None = None):
  """Fresh parameters in the layout of `config.loop`; the same numbers for every loop and every scheme's twin.

  Args:
    batch: as of `apply`, read by schemes whose start depends on data (Admin).

  Raises:
    UserError: the scheme needs a batch and there is none.
  """
  params = unprofiled(config, rng)
  if schemes.has(config, 'profiled'):
    if batch is None:
      raise UserError(f'scheme {config.scheme!r} starts from the variance of its branches on a batch; give init one.')
    params = _profiled(config, params, batch)
  return params


def unprofiled(config: config_lib.ModelConfig, rng: jax.Array):
  """Fresh parameters that no batch was read for: those of `init` for most schemes, the shapes of them for all."""
  rng_outer, rng_layers = jax.random.split(rng)
  # One compiled draw a run: programs that draw each layer for itself take minutes to compile at 48 layers.
  draw = lambda run: jax.vmap(lambda i: nn.unbox(_draw(config, rng_layers, run, i)))(jnp.arange(len(run)))
  layers = {layout.run_name(run): draw(run) for run in layout.runs(config)}
  return layout.native(nn.unbox(_outside(config, rng_outer)) | {'layers': layers}, config)


def _profiled(config: config_lib.ModelConfig, params, batch):
  """Admin's start (arXiv 2004.08249): a of a sub-layer is the standard deviation of the sum that leaves the one below.

  a^2 = 1 for the first, and then Var[a x] + Var[f(x)] of the sub-layer below, its own a in force: behind a norm, where
  Var[x] is 1, that is Var[x_0] + the sum of Var[f_j] over all sub-layers below, the share of a Pre-LN branch.
  """
  w_BT = family(config).real_tokens(config, batch)
  def variance(x_BTD):
    x_BTD = x_BTD.astype(wide(x_BTD))
    mean = lambda v: jnp.sum(w_BT * jnp.mean(v, axis=-1)) / jnp.sum(w_BT)
    return mean(jnp.square(x_BTD - mean(x_BTD)))
  x_BTD, ctx = enter(config, params, inputs(config, batch), **placement(batch))
  def layer(carry, p):
    x_BTD, square = carry
    for sub in schemes.SUBLAYERS:  # the second pass through the block has both factors
      p = p | {f'{sub}_a': jnp.full_like(p[f'{sub}_a'], jnp.sqrt(square))}
      y_BTD, out = block.Block(config).apply({'params': p}, x_BTD, ctx, config.layer_ids[0])
      square = square * variance(out[f'{sub}_x']) + variance(out[f'{sub}_out'])
    return (y_BTD, square), p
  stacked = layout.stack(params, config)
  (name, of_layers), = stacked['layers'].items()
  start = (x_BTD, jnp.ones((), wide(x_BTD)))
  return layout.native(stacked | {'layers': {name: jax.lax.scan(layer, start, of_layers)[1]}}, config)


def enter(config: config_lib.ModelConfig, params, tokens, segment_ids=None, step=None,
          past: attention.Past | None = None, **placed) -> tuple[jax.Array, attention.Context]:
  """What `inputs` gives -> (the stream that enters layer 1, [B, T, D] in the compute type; what every layer shares).

  segment_ids, placed: see `placement`. step: as of `stream`. past: of rows of text whose beginning is cached, see
  `lns_jax.models.decode`.
  """
  if past is None:
    x_BTD = family(config).embed(config, params, tokens, segment_ids)
  else:
    x_BTD = decoder.embed(config, params, tokens, past=past)
  if config.has_embed_norm:
    x_BTD = Norm(config).apply({'params': params.get('embed_norm', {})}, x_BTD)
  return mesh.constrain(x_BTD, STREAM), attention.context(config, x_BTD, segment_ids, step, past, **placed)


def final_norm(config: config_lib.ModelConfig, params, x_BTD: jax.Array) -> jax.Array:
  """Last stream -> what the head reads: the final norm of it, if there is one, never scaled by a scheme's factor."""
  if config.has_final_norm:
    x_BTD = Norm(config).apply({'params': params.get('final_norm', {})}, x_BTD)
  if schemes.has(config, 'completep'):
    x_BTD = times(x_BTD, 1 / completep.width(config))
  return x_BTD


def head(config: config_lib.ModelConfig, params, x_BTD: jax.Array) -> jax.Array:
  """Last stream -> logits, float32 or wider."""
  return family(config).logits(config, params, final_norm(config, params, x_BTD))


def layers(config: config_lib.ModelConfig, params, x_BTD: jax.Array, ctx: attention.Context, read: Read):
  """All blocks in turn.

  Returns:
    x_BTD: the stream after the last block.
    kept: what `read` kept of each block's `out`, in the layout of params['layers'].

  Raises UserError when the mesh in force has stages that these layers cannot be spread over, see `pipeline.check`.
  """
  def step(p, x, ctx, layer, override):
    x, out = block.Block(config).apply({'params': p}, x, ctx, layer, override)
    return mesh.constrain(x, STREAM), read(out)
  staged = mesh.size('stage') > 1 and layout.is_stacked(params['layers'])
  return (pipeline if staged else loop).walk(config, params['layers'], x_BTD, ctx, step)


def stream(config: config_lib.ModelConfig, params, tokens: jax.Array, segment_ids=None,
           read: Read = lambda out: {}, step=None, **placed):
  """Embedding and blocks. Returns (stream before the final norm [B, T, D], kept).

  kept: {'embed': what `read` keeps of {'out': embedding}, 'layers': as of `layers`}.
  segment_ids, placed: see `placement`.
  step: finished updates while training, which ProRes' factors grow with; else `config.ramp_step` says.
  """
  x_BTD, ctx = enter(config, params, tokens, segment_ids, step, **placed)
  embedding = read({'out': x_BTD})
  x_BTD, kept = layers(config, params, x_BTD, ctx, read)
  return x_BTD, {'embed': embedding, 'layers': kept}


def before_head(config: config_lib.ModelConfig, params, batch, read: Read = lambda out: {}, step=None):
  """What the head reads of a batch: (final norm of the last stream [B, T, D], kept as of `stream`)."""
  x_BTD, kept = stream(config, params, inputs(config, batch), read=read, step=step, **placement(batch))
  return final_norm(config, params, x_BTD), kept


def forward(config: config_lib.ModelConfig, params, tokens: jax.Array, *, segment_ids=None, token_types=None,
            **placed) -> jax.Array:
  """tokens [B, T] -> logits [B, T, V] float32; or images [B, S, S, C] -> logits [B, classes].

  Segment 0 is padding; positions restart at each segment. Of an encoder: token_types [B, T] are 0 by default; with
  model.head = squad the logits are [B, T, 2], with none there are none, which is a UserError. placed: 'coordinates',
  'windows' as of `attention.context`.
  """
  x_BTD, _ = stream(config, params, typed(config, tokens, token_types), segment_ids, **placed)
  return head(config, params, x_BTD)


def states(config: config_lib.ModelConfig, params, tokens: jax.Array, *, segment_ids=None, token_types=None,
           **placed) -> jax.Array:
  """The residual stream [L+1, B, T, D]: the embedding, then after each block, all before the final norm.

  tokens [B, T]; or images [B, S, S, C] of a ViT, whose T are the CLS token, if it has one, and the patches in rows.
  placed: as of `forward`.
  """
  _, kept = stream(config, params, typed(config, tokens, token_types), segment_ids,
                   lambda out: {'out': out['out']}, **placed)
  return jnp.concatenate([kept['embed']['out'][None], layout.joined(kept['layers'])['out']])


def tap_names(config: config_lib.ModelConfig) -> list[str]:
  """Every name that `apply` can return."""
  fields = [f'{sub}_{kind}' for sub in schemes.SUBLAYERS for kind in ('x', 'in', 'out', 'branch')] + ['out']
  return ['embed', *(f'layers/{l}/{f}' for l in config.layer_ids for f in fields)]


def apply(config: config_lib.ModelConfig, params, batch: Mapping[str, jax.Array], taps=()):
  """Logits and the named intermediates.

  Args:
    batch: 'tokens' [B, T] and optionally 'segment_ids', of an encoder 'token_types'; or 'images' [B, S, S, C].
    taps: names or patterns such as 'layers/7/attn_out', 'layers/*/out', 'embed'; see `tap_names`.

  Returns:
    (logits as of `forward`, {name: [B, T, D]}).

  Raises:
    UserError: when a tap matches nothing.
  """
  names = tap_names(config)
  wanted = [n for n in names if any(fnmatch(n, t) for t in taps)]
  for t in taps:
    if not any(fnmatch(n, t) for n in names):
      raise UserError(f"no intermediate is called {t!r}; there are 'embed' and layers/l/field with field one of "
                      f"{', '.join(n.split('/')[2] for n in names[1:10])}.")
  fields = {n.split('/')[-1] for n in wanted} - {'embed'} | {'out'}
  x_BTD, kept = stream(config, params, inputs(config, batch),
                       read=lambda out: {f: v for f, v in out.items() if f in fields}, **placement(batch))
  kept = layout.unstack(kept | {'embed': kept['embed']['out']})
  find = lambda n: functools.reduce(operator.getitem, n.split('/'), kept)
  return head(config, params, x_BTD), {n: find(n) for n in wanted}


def remove_layers(config: config_lib.ModelConfig, params, ids):
  """The model without the layers `ids`; every other layer keeps its own index and factor.

  Returns (config, params). Raises UserError for an id that the model does not have, or when none would stay.
  """
  missing = sorted(set(ids) - set(config.layer_ids))
  if missing:
    raise UserError(f'the model has no layer {missing[0]}; its layers are {layout.run_name(config.layer_ids)}.')
  rest = tuple(l for l in config.layer_ids if l not in set(ids))
  if not rest:
    raise UserError('removing every layer leaves no model; keep at least one.')
  config = dataclasses.replace(config, layer_ids=rest, num_layers=len(rest))
  params = layout.unstack(params)
  params = {**params, 'layers': {str(l): params['layers'][str(l)] for l in rest}}
  return config, layout.native(params, config)
