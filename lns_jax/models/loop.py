"""The loop over a model's layers: unrolled, each index static, or one compiled body for a run of equal layers."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import config as config_lib
from lns_jax import mesh
from lns_jax.errors import UserError
from lns_jax.layers import norms, param, schemes
from lns_jax.models import layout


# What `names` and `offload` keep: the output of every product but the scores, whose T x T are the memory that a policy
# is there to save. Norms, rotations, softmax and activations are made again; what no gradient reads is not kept.
# Of plain attention 'heads' is also softmax's divisor, a number a head and token.
NAMES = ('q', 'k', 'v', 'heads', 'o', 'gate', 'up', 'down')


def remat(config: config_lib.ModelConfig, step: Callable, in_scan: bool = False) -> Callable:
  """A function of (variables, x_BTD), its activations recomputed in the backward pass as far as the config says."""
  if config.remat == 'none':
    return step
  # Inside a scan nothing can be merged across iterations, so that the barrier against it only costs.
  return jax.checkpoint(step, prevent_cse=not in_scan, policy=_policy(config.remat))


def _policy(remat: str):
  """Which intermediates stay. Raises UserError where model.remat = offload has no memory to move them to."""
  policies = jax.checkpoint_policies
  if remat == 'offload':
    check_offload(mesh.platform())
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=list(NAMES), offload_src='device',
        offload_dst='pinned_host')
  return policies.save_only_these_names(*NAMES) if remat == 'names' else None


def check_offload(platform: str):
  """Refuses model.remat = offload where the device's memory is the host's."""
  if platform == 'cpu':
    raise UserError('model.remat = offload moves activations from the memory of a TPU or GPU to that of its host, and '
                    'on a CPU both are one; names keeps the same ones.')


def run_factors(config: config_lib.ModelConfig, run: layout.Run) -> dict[str, schemes.Factors]:
  """Factors of a run of layers: a Python float where all agree, else one constant fp32 vector."""
  each = [schemes.factors(config, l) for l in run]
  dtype = jnp.promote_types(param.dtypes(config)[1], jnp.float32)
  def merge(sub, field):
    values = [getattr(e[sub], field) for e in each]
    return values[0] if len(set(values)) == 1 else np.array(values, dtype)
  return {sub: schemes.Factors(*(merge(sub, f) for f in schemes.FACTORS)) for sub in schemes.SUBLAYERS}


def walk(config: config_lib.ModelConfig, variables: dict, x_BTD: jax.Array, ctx, step: Callable):
  """All blocks in turn.

  Args:
    variables: of each layer's Block, under its name, in either layout: {'params': ...}, or more beside them.
    ctx: what the layers share, handed on to each step.
    step: (variables of a layer, x_BTD, ctx, layer id, factors or None) -> (x_BTD, what is kept); the factors are those
      of a scanned layer.

  Returns (the stream after the last block, {name as of `variables`: kept}).
  """
  kept = {}
  if not layout.is_stacked(variables):
    for l in config.layer_ids:
      x_BTD, kept[str(l)] = remat(config, lambda v, x, l=l: step(v, x, ctx, l, None))(variables[str(l)], x_BTD)
    return x_BTD, kept
  for run in layout.runs(config):
    name = layout.run_name(run)
    layers, k = prepared(config, run, variables[name])
    x_BTD, kept[name] = scan(config, run, layers, k, x_BTD, ctx, step)
  return x_BTD, kept


def prepared(config: config_lib.ModelConfig, run: layout.Run, variables: dict):
  """(layers, factors) of a run, as `scan` takes them.

  Where s differs between layers, each has its own on its gains, which are multiplied here, all at once: the body of the
  loop is then Pre-LN's. A TPU's compiler would make a fusion of each multiplication in it.
  """
  k, params = run_factors(config, run), dict(variables['params'])
  own = {sub: {f: v for f, v in vars(k[sub]).items() if not isinstance(v, float)} for sub in k}
  ramps = isinstance(schemes.row(config, run[0]).s, schemes.Ramp)  # its constant is a rate, no factor
  for sub in k:
    norm = params.get(f'{sub}_in_norm', {})
    if 's' in own[sub] and 'gain' in norm and not ramps:
      params[f'{sub}_in_norm'] = norms.scaled(norm, own[sub].pop('s'))
      k[sub] = dataclasses.replace(k[sub], s=1.0)
  return (variables | {'params': params}, own), k


def scan(config: config_lib.ModelConfig, run: layout.Run, layers, k: dict[str, schemes.Factors], x_BTD: jax.Array, ctx,
         step: Callable):
  """Layers of a run in turn, by one compiled body.

  layers: (variables, {sub-layer: {factor: vector}} in place of those of k), both with a leading axis: of the whole run,
    or of any part of it.
  """
  def body(x, layer):
    variables, own = layer
    return step(variables, x, ctx, run[0], {sub: schemes.Factors(**{**vars(k[sub]), **own[sub]}) for sub in k})
  return jax.lax.scan(remat(config, body, in_scan=True), x_BTD, layers)
