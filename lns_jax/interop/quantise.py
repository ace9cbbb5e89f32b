"""Weights of 8 bits for inference.

The matrices of the blocks become int8 with one float32 scale per output channel, a quarter of their float32 memory;
embedding, head, norms, biases and learned factors stay as they are, and so does the type that the model computes in:
`lns_jax.layers.param.dot` multiplies values and scales at their use.

The arrays are qwix's. Its interception of Flax modules is not used: it belongs to a module that was made beforehand,
while ours are made inside pure functions, it refuses arrays that are quantised already, and its einsum drops the
precision that keeps float32 products float32 on a TPU.
"""

import functools

import jax
import jax.numpy as jnp

from lns_jax.errors import UserError
from lns_jax.layers import param
from lns_jax.models import layout

# How many leading axes of a matrix are summed over; the others are output channels.
INPUTS = {'q': 1, 'k': 1, 'v': 1, 'o': 2, 'gate': 1, 'up': 1, 'down': 1}
# 127 steps to either side of 0. By itself qwix takes 127.5, so that the largest negative entry becomes -128 while the
# largest positive one saturates, and -w is not the negative of w.
CALIBRATION = f'absmax,{127.5 / 127}'


def int8(params):
  """The model with matrices of 8 bits.

  Args:
    params: parameters of a decoder or ViT in either layout, on any devices.

  Returns:
    The same tree with `qwix.QArray` in place of each matrix of a block: 'qvalue' int8 of the matrix's shape, 'scale'
    float32 of that shape with 1 for each axis that is summed over, the largest |entry| of the channel over 127 (1 for a
    channel of zeros); an entry is off by half a scale at most. Every function of a model takes it, except for
    those that differentiate by parameters or write them to disk. Matrices that are int8 already stay so.

  Raises:
    UserError: qwix is not installed.
  """
  layers = int(layout.is_stacked(params['layers']))  # leading axes that count layers

  def change(path, w):
    name = path[-1].key
    if name not in INPUTS or param.is_quantised(w):
      return w
    channels = (*range(layers), *range(layers + INPUTS[name], w.ndim))
    return _int8(w, channels)

  changed = jax.tree_util.tree_map_with_path(change, params['layers'], is_leaf=param.is_quantised)
  return params | {'layers': changed}


@functools.partial(jax.jit, static_argnums=1)
def _int8(w: jax.Array, channels: tuple[int, ...]):
  """A `qwix.QArray` of w with a scale for each index of the axes `channels`; w as a float32 copy is never whole."""
  try:
    import qwix  # not at the top: it takes a second
  except ImportError:
    raise UserError("int8 weights need the package qwix: pip install 'lns_jax[quant]'.") from None
  return qwix.quantize(w.astype(jnp.float32), jnp.int8, channelwise_axes=channels, calibration_method=CALIBRATION)


def nbytes(params) -> int:
  """Memory of a tree of arrays, in bytes."""
  return sum(x.nbytes for x in jax.tree.leaves(params))
