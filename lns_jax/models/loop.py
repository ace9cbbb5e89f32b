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


def walk(config: config_lib.ModelConfig, trees: dict, x_BTD: jax.Array, step: Callable):
  """All blocks in turn.

  Args:
    trees: what each layer has, a tree under its name, in either layout: params['layers'], or more beside them.
    step: (tree, x_BTD, layer id, factors or None) -> (x_BTD, what is kept); the factors are those of a scanned layer.

  Returns (the stream after the last block, {name as of `trees`: kept}).
  """
  kept = {}
  if not layout.is_stacked(trees):
    for l in config.layer_ids:
      x_BTD, kept[str(l)] = _remat(config, lambda t, x, l=l: step(t, x, l, None))(trees[str(l)], x_BTD)
    return x_BTD, kept
  for run in layout.runs(config):
    name = layout.run_name(run)
    x_BTD, kept[name] = _scan_run(config, trees[name], x_BTD, run, step)
  return x_BTD, kept


def _scan_run(config, stacked, x_BTD, run: layout.Run, step: Callable):
  k = run_factors(config, run)
  vectors = {sub: {f: v for f, v in vars(k[sub]).items() if not isinstance(v, float)} for sub in k}
  def body(x, scanned):
    tree, scalars = scanned
    override = {sub: schemes.Factors(**{**vars(k[sub]), **scalars[sub]}) for sub in k}
    return step(tree, x, run[0], override)
  return jax.lax.scan(_remat(config, body, in_scan=True), x_BTD, (stacked, vectors))
