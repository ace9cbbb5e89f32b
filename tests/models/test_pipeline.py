"""A pipeline is the model it spreads over devices: values, gradients, what is kept, and no traffic for the factors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax import mesh as mesh_lib
from lns_jax import sharding
from lns_jax.config import MeshConfig
from lns_jax.errors import UserError
from lns_jax.models import decode, layout, pipeline, transformer
from lns_jax.train import nonfinite
from lns_jax.train import step as step_lib
from programs import collectives, constants
from tiny import batch, leaves_close, model, params

L, V, T = 4, 32, 8
TINY = dict(d_model=16, d_ff=32, num_layers=L, vocab_size=V, loop='scan')


def mesh_of(**sizes):
  settings = MeshConfig(**({'data': 1} | sizes))
  return sharding.make_mesh(settings, jax.devices()[:int(np.prod(list(sizes.values()) or [1]))])


def placed(config, mesh, rows: int = 8):
  """Parameters as training places them and rows as they come, which need not divide."""
  return jax.device_put(params(config), sharding.params(mesh, config)), batch(rows, T, V)


def on(mesh, function, *args):
  with sharding.use(mesh):
    return jax.device_get(jax.jit(function)(*args))


def differentiated(config, mesh, rows: int = 8):
  """((loss sum, (weight, statistics)), stacked gradient: a scalar's is measured by the largest of all layers)."""
  found, grads = on(mesh, jax.value_and_grad(
      lambda p, b: step_lib.loss_sums(config, p, b, with_stats=True, chunk=-1), has_aux=True), *placed(config, mesh, rows))
  return found, layout.stack(grads, config)


@functools.cache
def alone(scheme: str, precision: str):
  """On one device."""
  return differentiated(model(**TINY, scheme=scheme, precision=precision), mesh_of())


CASES = {
    'dp+pp': (dict(stage=2, data=2), dict(remat='full', scheme='lns')),
    'pp': (dict(stage=4), dict(microbatches=8, scheme='lns')),
    'one part': (dict(stage=4, data=2), dict(microbatches=1, scheme='lns_learned')),
    'pp+tp+dp': (dict(stage=2, data=2, tensor=2), dict(remat='full', scheme='lns_learned')),
}
FAST = 'pp+tp+dp', 'float64'


@pytest.mark.parametrize('case, precision', [
    pytest.param(case, precision, marks=() if (case, precision) == FAST else pytest.mark.slow)
    for case in CASES for precision in ('float32', 'float64')])
def test_loss_gradients_and_statistics_are_those_of_one_device(case, precision):
  """Alpha's gradient among them: every layer has its own factor, whichever stage it is on."""
  sizes, settings = CASES[case]
  tolerance = 1e-6 if precision == 'float32' else 1e-12
  with jax.enable_x64(precision == 'float64'):
    config = model(**TINY, precision=precision, **settings)
    (total, (_, kept)), grads = differentiated(config, mesh_of(**sizes))
    (expected, (_, of_one)), right = alone(config.scheme, precision)
    assert float(total) == pytest.approx(float(expected), rel=tolerance)
    leaves_close(kept, of_one, tolerance)
    leaves_close(grads, right, 2 * tolerance)
    if config.scheme == 'lns_learned':
      assert len(set(grads['layers'][f'1-{L}']['attn_s'].tolist())) == L


def test_a_stage_without_a_part_does_no_harm():
  """Zeros there would meet the slope of a norm at 0, which is infinite in float32 with this epsilon: 0 * inf."""
  config = model(**TINY, scheme='lns', norm_eps=1e-30, microbatches=1)
  (total, _), grads = differentiated(config, mesh_of(stage=4), rows=2)
  assert np.isfinite(total) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_bfloat16_compiles_on_a_cpu_too():
  config = model(**TINY, scheme='lns', precision='bfloat16')
  (total, _), _ = differentiated(config, mesh_of(stage=2, data=2))
  assert float(total) == pytest.approx(float(alone('lns', 'float32')[0][0]), rel=1e-2)


@pytest.mark.parametrize('rows', [1, 3, 6])
def test_states_and_any_number_of_rows(rows):
  """Whatever a layer keeps comes back by layer, rows in their order, and fewer rows than in training do too."""
  config = model(**TINY, scheme='lns', microbatches=4)
  p, b = placed(config, mesh := mesh_of(stage=2), rows)
  found = on(mesh, lambda p: transformer.states(config, p, b['tokens'], segment_ids=b['segment_ids']), p)
  right = transformer.states(config, params(config), b['tokens'], segment_ids=b['segment_ids'])
  leaves_close(found, right, 1e-6)


def test_a_cache_is_extended_on_a_mesh_with_stages():
  config, mesh = model(**TINY, scheme='lns'), mesh_of(stage=2)
  p, b = placed(config, mesh, 2)
  logits, _ = on(mesh, lambda p: decode.extend(config, p, b['tokens'], decode.init(config, 2, T)), p)
  leaves_close(logits, transformer.forward(config, params(config), b['tokens']), 2e-6)


def test_a_layer_whose_output_is_not_finite_is_named():
  config, mesh = model(**TINY, scheme='lns'), mesh_of(stage=2, data=2)
  p = params(config)
  p['layers'][f'1-{L}']['mlp']['down'] = p['layers'][f'1-{L}']['mlp']['down'].at[2, 0, 0].set(np.nan)
  p, b = jax.device_put(p, sharding.params(mesh, config)), batch(8, T, V)
  with sharding.use(mesh):
    assert nonfinite.first_bad(config, p, b, step=0) == 'layer 3'


def lowered(scheme: str):
  """The forward pass of a pipeline with tensor and data axes."""
  config, mesh = model(**TINY, scheme=scheme), mesh_of(stage=2, data=2, tensor=2)
  p, b = placed(config, mesh)
  with sharding.use(mesh):
    where = sharding.batch(mesh)
    tokens = jax.ShapeDtypeStruct(b['tokens'].shape, jnp.int32, sharding=where)
    return jax.jit(lambda p, t: transformer.forward(config, p, t)).lower(p, tokens)


def test_no_collective_touches_the_factors():
  """They are constants of the program: lns sends what pre sends, not a byte more, and nothing as long as L."""
  lns, pre = lowered('lns'), lowered('pre')
  right = (np.arange(1, L + 1) ** -0.5).astype(np.float32)
  assert any(np.array_equal(v, right) for v in constants(lns.as_text(), L)) and not constants(pre.as_text(), L)
  sent = collectives(lns.compile().as_text())
  assert sent == collectives(pre.compile().as_text()) and {'collective-permute', 'all-reduce'} == {k for _, k in sent}
  assert not any(re.match(rf'f32\[({L}|{L // 2}|1)?\]', shape) for shape, _ in sent)


@pytest.mark.parametrize('settings, stages, words', [
    (dict(loop='unrolled'), 2, 'model.loop = scan, not unrolled'),
    (dict(loop='scan', scheme='mix', num_layers=4), 2, r'unlike ones \(1-1; 2-4\)'),
    (dict(loop='scan', scheme='keel', num_layers=4), 2, 'unlike ones'),
    (dict(loop='scan', sliding_window=4, window_layers=(2,), num_layers=4), 2, 'unlike ones'),
    (dict(loop='scan', num_layers=12), 8, 'mesh.stage = 8 does not divide the 12 layers of the model; 6 or 12 would')])
def test_what_cannot_be_spread_is_refused(settings, stages, words):
  config = model(**settings)
  with pytest.raises(UserError, match=words):
    pipeline.check(config, stages)
  pipeline.check(config, 1)


def test_the_parts_are_as_many_as_stages_unless_told():
  assert [pipeline.parts(model(microbatches=m), s) for m, s in ((0, 4), (8, 4), (8, 1))] == [4, 8, 1]


def test_the_mesh_in_force_is_asked():
  with sharding.use(mesh_of(stage=4)):
    assert mesh_lib.size('stage') == 4
    with pytest.raises(UserError, match='does not divide the 6 layers'):
      c = model(**TINY | dict(num_layers=6))
      jax.eval_shape(lambda: transformer.forward(c, params(c), batch(4, T, V)['tokens']))
