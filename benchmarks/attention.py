"""Bytes and temporaries of an attention sub-layer by T, plain products (xla) beside the kernel (splash).

  python benchmarks/attention.py [--topology=v5e:1x1] [--tokens=16384]

Compiled for one chip on a CPU and never run; needs libtpu. The sub-layer has 12 heads of 64, as LLaMA-130M's, bfloat16
numbers and float32 parameters; forward and backward of rows with documents. Ends with one JSON line: {'topology',
'tokens', 'rows': [{'T', and for xla and splash 'bytes' and 'temp_bytes', the compiler's own counts}]}.
"""

from absl import flags

from lns_jax import cli, host
from lns_jax.errors import UserError

TOPOLOGY = flags.DEFINE_string('topology', 'v5e:1x1', 'One chip.')
TOKENS = flags.DEFINE_integer('tokens', 16_384, 'Tokens of the batch, whatever T is.', lower_bound=1)
LENGTHS = flags.DEFINE_list('lengths', ['128', '256', '512', '1024', '2048'], 'T: tokens of a row.')


def measure(attention: str, B: int, T: int, mesh) -> dict[str, float]:
  """{'bytes' accessed, 'temp_bytes'} of the sub-layer with model.attention = `attention`, forward and backward."""
  import jax
  import jax.numpy as jnp
  from flax.core import meta

  from lns_jax import sharding
  from lns_jax.config import ModelConfig
  from lns_jax.layers import splash
  from lns_jax.layers.attention import Attention, context

  config = ModelConfig(d_model=768, num_heads=12, attention=attention, precision='bfloat16')
  layer, where = Attention(config), sharding.replicated(mesh)
  def run(params, x_BTD, segment_ids_BT, dy_BTD):
    f = lambda p, x: layer.apply({'params': p}, x, context(config, x, segment_ids_BT), 1)
    y_BTD, backward = jax.vjp(f, params, x_BTD)
    return y_BTD, backward(dy_BTD)
  shape = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where)
  x_BTD = jax.ShapeDtypeStruct((B, T, config.d_model), jnp.bfloat16)
  with sharding.use(mesh):
    splash.describe(config, T, 'tpu')  # raises where the kernel cannot be
    start = lambda x: layer.init(jax.random.key(0), x, context(config, x), 1)['params']
    params = meta.unbox(jax.eval_shape(start, x_BTD))
    inputs = (params, x_BTD, jax.ShapeDtypeStruct((B, T), jnp.int32), x_BTD)
    compiled = jax.jit(run).lower(*jax.tree.map(shape, inputs)).compile()
  return {'bytes': compiled.cost_analysis()['bytes accessed'],
          'temp_bytes': compiled.memory_analysis().temp_size_in_bytes}


def main():
  lengths = cli.integers('lengths', LENGTHS.value)
  for T in lengths:
    if not 1 <= T <= TOKENS.value:
      raise UserError(f'--lengths={T} cannot be: a row has from 1 to --tokens={TOKENS.value} tokens.')
  host.compile_for_tpu()
  from lns_jax import sharding
  from lns_jax.aot import compile_tpu
  from lns_jax.config import MeshConfig
  mesh = sharding.make_mesh(MeshConfig(), list(compile_tpu.Target.of(TOPOLOGY.value).devices))
  print('| T | bytes xla | bytes splash | temporaries xla | temporaries splash |\n|---|---|---|---|---|')
  rows = []
  for T in lengths:
    rows.append({'T': T} | {name: measure(name, TOKENS.value // T, T, mesh) for name in ('xla', 'splash')})
    cells = [rows[-1][name][what] for what in ('bytes', 'temp_bytes') for name in ('xla', 'splash')]
    print(f'| {T} |', ' | '.join(f'{cell / 1e9:.2f}e9' for cell in cells), '|', flush=True)
  return {'topology': TOPOLOGY.value, 'tokens': TOKENS.value, 'rows': rows}


if __name__ == '__main__':
  cli.run(main)
