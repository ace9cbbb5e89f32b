"""The loop over a model's layers: unrolled, each index static, or one compiled body for a run of equal layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import config as config_lib
from lns_jax.layers import param, schemes
from lns_jax.models import layout


def _remat(config: config_lib.ModelConfig, step: Callable, in_scan: bool = False) -> Callable:
  """The step of a loop over layers, its activations recomputed in the backward pass if the config says so."""
  # Inside a scan nothing can be merged across iterations, so that the barrier against it only costs.
  return jax.checkpoint(step, prevent_cse=not in_scan) if config.remat == 'full' else step


def run_factors(config: config_lib.ModelConfig, run: layout.Run) -> dict[str, schemes.Factors]:
  """Factors of a run of layers: a Python float where all agree, else one constant fp32 vector."""
  each = [schemes.factors(config, l) for l in run]
  dtype = jnp.promote_types(param.dtypes(config)[1], jnp.float32)
  def merge(sub, field):
    values = [getattr(e[sub], field) for e in each]
    return values[0] if len(set(values)) == 1 else np.array(values, dtype)
  return {sub: schemes.Factors(*(merge(sub, f) for f in schemes.FACTORS)) for sub in schemes.SUBLAYERS}


def varying(factors: dict[str, schemes.Factors]) -> dict[str, dict[str, np.ndarray]]:
  """Those of `run_factors` that differ between the layers of the run: {sub-layer: {factor: vector}}."""
  return {sub: {f: v for f, v in vars(k).items() if not isinstance(v, float)} for sub, k in factors.items()}


def walk(config: config_lib.ModelConfig, trees: dict, x_BTD: jax.Array, ctx, step: Callable):
  """All blocks in turn.

  Args:
    trees: what each layer has, a tree under its name, in either layout: params['layers'], or more beside them.
    ctx: what the layers share, handed on to each step.
    step: (tree, x_BTD, ctx, layer id, factors or None) -> (x_BTD, what is kept); the factors are those of a scanned
      layer.

  Returns (the stream after the last block, {name as of `trees`: kept}).
  """
  kept = {}
  if not layout.is_stacked(trees):
    for l in config.layer_ids:
      x_BTD, kept[str(l)] = _remat(config, lambda t, x, l=l: step(t, x, ctx, l, None))(trees[str(l)], x_BTD)
    return x_BTD, kept
  for run in layout.runs(config):
    name, vectors = layout.run_name(run), varying(run_factors(config, run))
    x_BTD, kept[name] = scan(config, run, (trees[name], vectors), x_BTD, ctx, step)
  return x_BTD, kept


def scan(config: config_lib.ModelConfig, run: layout.Run, layers: tuple, x_BTD: jax.Array, ctx, step: Callable):
  """Layers of a run in turn, by one compiled body.

  layers: (trees, `varying` factors), both with a leading axis: of the whole run, or of any part of it.
  """
  k = run_factors(config, run)
  def body(x, layer):
    tree, own = layer
    return step(tree, x, ctx, run[0], {sub: schemes.Factors(**{**vars(k[sub]), **own[sub]}) for sub in k})
  return jax.lax.scan(_remat(config, body, in_scan=True), x_BTD, layers)
