"""What a layer leaves for its backward pass changes memory and products made again, and no number."""

import dataclasses

import jax
import numpy as np
import pytest

from lns_jax import config as config_lib
from lns_jax import sharding
from lns_jax.errors import UserError
from lns_jax.models import layout, transformer
from lns_jax.train import step as step_lib
from tiny import batch, leaves_close, model, params

POLICIES = ('none', 'names', 'full')
DOTS = 9  # of a layer's forward pass: q, k, v, scores, weighted values, o, gate, up, down


def loss_and_gradient(config):
  return jax.jit(jax.value_and_grad(lambda p, b: step_lib.loss_sums(config, p, b)[0]))


def abstract(config, T=16):
  """Shapes of parameters and of a batch of 2 rows."""
  one = dataclasses.replace(config, num_layers=1, layer_ids=(1,), loop='unrolled')
  layer = jax.eval_shape(lambda: transformer.init(one, jax.random.key(0)))
  layers = {str(l): layer['layers']['1'] for l in config.layer_ids}
  shapes = jax.eval_shape(lambda p: layout.native(p, config), layer | {'layers': layers})
  return shapes, {k: jax.ShapeDtypeStruct((2, T), np.int32) for k in ('tokens', 'targets', 'segment_ids')}


def dots(config) -> int:
  """Products in the program as it is written, the body of a scan once."""
  return loss_and_gradient(config).lower(*abstract(config)).as_text().count('stablehlo.dot_general')


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
@pytest.mark.parametrize('more', [
    {'scheme': 'lns'}, pytest.param({'scheme': 'res_norm', 'bias': 'all', 'qk_norm': 'head'}, marks=pytest.mark.slow)])
def test_no_policy_changes_a_number(loop, more):
  with jax.enable_x64(True):
    config = model(loop=loop, precision='float64', d_model=16, d_ff=32, **more)
    p, b = params(config), batch()
    value, grads = loss_and_gradient(config)(p, b)
    for remat in ('names', 'full'):
      other, again = loss_and_gradient(dataclasses.replace(config, remat=remat))(p, b)
      assert float(other) == pytest.approx(float(value), rel=1e-12)
      leaves_close(again, grads, 1e-12)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
@pytest.mark.parametrize('scheme, of_full', [('lns', 8), ('res_norm', 9)])
def test_what_is_kept_by_name_is_not_made_again(loop, scheme, of_full):
  """The backward pass has two products for each of the forward pass, the head three in all. `names` makes the scores
  again; `full` all but the last of a layer, and that too where a norm behind it needs its input."""
  layers = 2 if loop == 'unrolled' else 1
  again = {remat: (dots(model(loop=loop, scheme=scheme, remat=remat)) - 3) / layers - 3 * DOTS for remat in POLICIES}
  assert again == {'none': 0, 'names': 1, 'full': of_full}


@pytest.mark.parametrize('bias', ['none', 'all'])
def test_nothing_is_kept_twice(bias):
  """By hand: what a scan hands to its backward pass, [L, ...], are the inputs of the layers and the named outputs."""
  c, B, T = model(num_layers=3, loop='scan', remat='names', scheme='lns', bias=bias), 2, 16
  jaxpr = jax.make_jaxpr(jax.grad(lambda p, b: step_lib.loss_sums(c, p, b)[0]))(*abstract(c))
  forward = next(e for e in jaxpr.eqns if e.primitive.name == 'scan')
  rows = [v.aval.shape for v in forward.outvars if v.aval.shape[:3] == (3, B, T)]
  stream, mlp = (3, B, T, c.d_model), (3, B, T, c.d_ff)
  q, k = (3, B, T, c.num_heads, c.head_dim), (3, B, T, c.num_kv_heads, c.head_dim)
  assert sorted(rows) == sorted([stream, q, k, k, q, stream, mlp, mlp])  # x, q, k, v, heads, o, gate, up


def test_memory_falls_from_none_to_names_to_full():
  """Scanned: on a CPU the barriers of the unrolled loop keep most of it alive."""
  config = model(num_layers=6, loop='scan', scheme='lns')
  temporary = [loss_and_gradient(c).lower(*abstract(c, 128)).compile().memory_analysis().temp_size_in_bytes
               for c in (dataclasses.replace(config, remat=r) for r in POLICIES)]
  assert temporary[0] > 1.2 * temporary[1] > 1.2 * 1.2 * temporary[2]


def test_offload_is_refused_on_a_cpu():
  config = config_lib.RunConfig(model=model(remat='offload'), train=config_lib.TrainConfig(steps=1, batch_size=8))
  mesh = sharding.make_mesh(config.mesh)
  with pytest.raises(UserError, match='on a CPU both are one; names keeps the same ones.'):
    sharding.check(config, mesh)
  with pytest.raises(UserError, match='model.remat = offload'), sharding.use(mesh):
    dots(config.model)


@pytest.mark.parametrize('remat', POLICIES)
def test_a_scanned_program_does_not_grow_with_depth(remat):
  """A whole step, as written, with layer statistics: the same operations for 12 layers and for 192, but for the digits
  of sizes and the constant factors."""
  def lines(L):
    config = config_lib.RunConfig(model=model(num_layers=L, loop='scan', remat=remat, scheme='lns', d_model=16, d_ff=32),
                                  train=config_lib.TrainConfig(steps=2, batch_size=2))
    assert config.train.layer_stats_every
    step = jax.jit(step_lib.make_train_step(config, 2))
    tokens = {k: jax.ShapeDtypeStruct((2, 16), np.int32) for k in ('tokens', 'targets', 'segment_ids')}
    text = step.lower(step_lib.shapes(config, 2), tokens).as_text()
    return [line for line in text.splitlines() if 'stablehlo.constant' not in line]
  short, long = lines(12), lines(192)
  assert len(short) == len(long)
  assert abs(sum(map(len, long)) / sum(map(len, short)) - 1) < 0.01
