"""How a parameter is declared: shape, logical axes and standard deviation in one line; and which types are used."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from lns_jax import config as config_lib
from lns_jax.layers import completep, fp8, schemes
from lns_jax.layers import init as init_lib

# Collection of variables that says which layers are drawn at once: 'ids' [n] of a run, 'position' of the one meant.
DRAWN = 'drawn'


def resolve_precision(name: str) -> str:
  """`auto` is float32 on a CPU and bfloat16 elsewhere."""
  if name != 'auto':
    return name
  return 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'


def dtypes(config: config_lib.ModelConfig) -> tuple[jnp.dtype, jnp.dtype]:
  """(parameter type, compute type) of a model on the present backend."""
  name = resolve_precision(config.precision)
  if name == 'float64' and not jax.config.jax_enable_x64:
    raise config_lib.UserError('model.precision = float64 needs JAX_ENABLE_X64=1 in the environment.')
  return tuple(map(jnp.dtype, config_lib.PRECISIONS[name]))


def matmul_precision(dtype: jnp.dtype):
  """float32 and wider means float32 products, also where the chip's default is narrower."""
  return jax.lax.Precision.HIGHEST if dtype.itemsize >= 4 else None


def dot(equation: str, x: jax.Array, w, **kwargs) -> jax.Array:
  """einsum in the type of x; parameters are cast, or made of their int8 values, at their use."""
  return jnp.einsum(equation, x, dense(w).astype(x.dtype), precision=matmul_precision(x.dtype), **kwargs)


def product(config: config_lib.ModelConfig, equation: str, x: jax.Array, w) -> jax.Array:
  """`dot` of a block's matrix, in 8-bit floats where the config says so; one of int8 values stays what it is."""
  if config.matmul == 'fp8' and not is_quantised(w):
    return fp8.einsum(equation, x, w)
  return dot(equation, x, w)


def is_quantised(w) -> bool:
  """Whether a weight is a `qwix.QArray`, see `lns_jax.interop.quantise`."""
  return hasattr(w, 'qvalue')


def dense(w) -> jax.Array:
  """A weight as an array: one of int8 is its values times their scales."""
  return w.qvalue.astype(w.scale.dtype) * w.scale if is_quantised(w) else w


def biased(module: nn.Module, name: str, x: jax.Array, axis: str) -> jax.Array:
  """x [B, T, ...], the output of projection `name`, plus its bias where the config gives it one; named for remat.

  The bias starts at 0. It is a vector over all dimensions behind T, as Hugging Face has it, so that weight decay
  knows it from a matrix; `axis` is its logical axis.
  """
  config = module.config
  if name in config_lib.BIASES[config.bias]:
    bias = vector(module, f'{name}_bias', nn.initializers.zeros, (math.prod(x.shape[2:]),), axis)
    x = x + bias.reshape(x.shape[2:]).astype(x.dtype)
  return checkpoint_name(x, name)


def start(module: nn.Module, number: Callable[[int], float], layer: int, dtype=None):
  """A number that a parameter starts from, number(layer) of a block.

  Where `models.transformer` draws all layers of a run in one traced call, the number of the layer at its position.

  dtype: that of the parameter, the config's by default: a number is rounded to it once.
  """
  root = module.scope.root
  if not root.has_variable(DRAWN, 'position'):
    return number(layer)
  numbers = [number(l) for l in root.get_variable(DRAWN, 'ids').tolist()]
  if len(set(numbers)) == 1:
    return numbers[0]
  return jnp.asarray(np.array(numbers, dtype or dtypes(module.config)[0]))[root.get_variable(DRAWN, 'position')]


def vector(module: nn.Module, name: str, init, shape: tuple[int, ...], axis: str = 'norm', dtype=None):
  """A vector, or with shape () a scalar, of a Linen module with a `config` attribute.

  init: of flax. axis: its logical axis. dtype: that of the config's parameters by default.
  """
  boxed = nn.with_logical_partitioning(init, (axis,) * len(shape))
  return module.param(name, boxed, shape, dtype or dtypes(module.config)[0])


def matrix(module: nn.Module, name: str, role: str, layer: int, shape: tuple[int, ...], axes: tuple[str, ...],
           fan_in: int):
  """A normally distributed weight of a Linen module with a `config` attribute.

  Args:
    role: decides the standard deviation, see `lns_jax.layers.init`.
    layer: 1-based layer index, 0 outside the blocks.
    axes: logical axis names, one a dimension, see `lns_jax.sharding`.
    fan_in: product of the contracted dimensions.
  """
  c, row = module.config, schemes.row(module.config, layer) if layer else schemes.Row()
  init = init_lib.INITS[row.init or c.init]
  def std_of(l):
    m = init_lib.Matrix(role, l, c.depth, c.init_std, c.d_model, fan_in, math.prod(shape) // fan_in)
    return init.std(m) * (completep.width(c) ** -0.5 if row.completep else 1.0)
  std = start(module, std_of, layer)
  if init.cut is None:
    draw = nn.initializers.normal(std)
  else:
    draw = nn.initializers.truncated_normal(std, lower=-init.cut, upper=init.cut)
  return module.param(name, nn.with_logical_partitioning(draw, axes), shape, dtypes(c)[0])


def factor(module: nn.Module, name: str, start: float | jax.Array, shape: tuple[int, ...] = ()):
  """A learned factor: float32 or wider whatever the parameters are, so that it does not move in steps of 1 / 256."""
  dtype = jnp.promote_types(dtypes(module.config)[0], jnp.float32)
  return vector(module, name, nn.initializers.constant(start), shape, dtype=dtype)
