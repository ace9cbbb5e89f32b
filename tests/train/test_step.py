"""One update: tokens weigh the same wherever they lie, devices do not matter, bad numbers change nothing."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax import config as config_lib
from lns_jax import sharding
from lns_jax.models import layout
from lns_jax.train import step as step_lib
from tiny import batch, leaves_close, model

STEPS = 10


def run(accumulation=1, loop='scan', mesh=(1, 1, 1), clip=0.0, stats=1, optimizer=None, **settings):
  return config_lib.RunConfig(
      model=model(loop=loop, **settings), data=config_lib.DataConfig(seq_len=16),
      # eps = 1 makes Adam nearly linear: its usual first step is the sign of the gradient, rounding included.
      optimizer=optimizer or config_lib.OptimizerConfig(lr=1.0, eps=1.0, clip_norm=clip, schedule='constant'),
      train=config_lib.TrainConfig(steps=STEPS, batch_size=8, accumulation=accumulation, layer_stats_every=stats),
      mesh=config_lib.MeshConfig(*mesh))


def ragged():
  """8 rows with 1..8 real tokens."""
  b = batch(8, 16, segments=False)
  return b | {'segment_ids': (np.arange(16)[None] < np.arange(1, 9)[:, None]).astype(np.int32)}


def step(config, b, state=None, updates=1):
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:config.mesh.data * config.mesh.fsdp * config.mesh.tensor])
  where = step_lib.state_shardings(mesh, config, STEPS)
  with sharding.use(mesh):
    state = state or jax.jit(lambda: step_lib.init_state(config, STEPS, b), out_shardings=where)()
    compiled = jax.jit(step_lib.make_train_step(config, STEPS), in_shardings=(where, sharding.batch(mesh)),
                       out_shardings=(where, sharding.replicated(mesh)))
    for _ in range(updates):
      state, metrics = compiled(state, b)
  return jax.device_get(state), jax.device_get(metrics)


def test_a_token_weighs_the_same_in_any_micro_batch():
  """Known fault O6: a mean of micro-batch means is 2.5 where 7/4 is right."""
  whole, metrics = step(run(), ragged())
  assert metrics['tokens'] == 36
  for parts in (2, 4, 8):
    split, other = step(run(accumulation=parts), ragged())
    for name in metrics:
      np.testing.assert_allclose(other[name], metrics[name], rtol=2e-5, atol=1e-7)
    leaves_close(split.params, whole.params, 1e-5)


def test_an_empty_micro_batch_changes_nothing():
  b = ragged()
  b['segment_ids'][::2] = 0  # with 2 micro-batches, row r goes to micro-batch r mod 2
  half = {k: v[1::2] for k, v in b.items()}
  whole, metrics = step(run(accumulation=2), b)
  alone, other = step(run(), half)
  assert metrics['tokens'] == other['tokens'] == 20
  np.testing.assert_allclose(metrics['loss'], other['loss'], rtol=1e-6)
  leaves_close(whole.params, alone.params, 1e-5)


def test_a_fully_masked_batch_is_no_nan_and_no_change():
  """Known fault S1."""
  b = batch(8) | {'segment_ids': np.zeros((8, 16), np.int32)}
  first = jax.device_get(jax.jit(lambda: step_lib.init_state(run(), STEPS))())
  state, metrics = step(run(), b)
  assert metrics['tokens'] == 0 and metrics['loss'] == 0 and metrics['grad_norm'] == 0
  jax.tree.map(np.testing.assert_array_equal, state.params, first.params)


@pytest.mark.parametrize('loop, mesh', [
    pytest.param('scan', (2, 1, 1), marks=pytest.mark.slow), ('scan', (8, 1, 1)),
    pytest.param('scan', (1, 4, 1), marks=pytest.mark.slow), ('scan', (2, 2, 2)), ('unrolled', (2, 2, 2))])
def test_devices_do_not_matter(loop, mesh):
  """Known faults O5 and P4: per-device means and per-shard norms."""
  one, metrics = step(run(clip=0.5, scheme='lns', loop=loop), ragged(), updates=2)
  many, other = step(run(clip=0.5, scheme='lns', loop=loop, mesh=mesh), ragged(), updates=2)
  np.testing.assert_allclose(other['loss'], metrics['loss'], rtol=1e-6)
  np.testing.assert_allclose(other['grad_norm'], metrics['grad_norm'], rtol=2e-6)
  leaves_close(many.params, one.params, 1e-5)


def test_neither_devices_nor_loops_matter_with_every_option_of_the_architectures():
  settings = dict(scheme='lns', bias='all', qk_norm='full', clip_qkv=0.5, sliding_window=5, clip=0.5)
  one, metrics = step(run(**settings), ragged(), updates=2)
  many, other = step(run(loop='unrolled', mesh=(2, 2, 2), **settings), ragged(), updates=2)
  np.testing.assert_allclose(other['loss'], metrics['loss'], rtol=1e-6)
  np.testing.assert_allclose(other['grad_norm'], metrics['grad_norm'], rtol=2e-6)
  leaves_close(many.params, layout.unstack(one.params), 1e-5)


def test_devices_do_not_matter_in_float64():
  with jax.enable_x64(True):
    one, metrics = step(run(clip=0.5, scheme='lns', precision='float64'), ragged())
    many, other = step(run(clip=0.5, scheme='lns', precision='float64', mesh=(2, 2, 2)), ragged())
    for name in ('loss', 'grad_norm', 'variance'):
      np.testing.assert_allclose(other[name], metrics[name], rtol=1e-12)


def test_the_norm_is_that_of_all_gradients_before_clipping():
  config = run(clip=0.1)
  state = jax.jit(lambda: step_lib.init_state(config, STEPS))()
  b = ragged()
  def mean(p):
    total, (weight, _) = step_lib.loss_sums(config.model, p, b)
    return total / weight
  grads = layout.unstack(jax.jit(jax.grad(mean))(state.params))
  expected = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(grads)))
  _, metrics = step(config, b)
  assert float(metrics['grad_norm']) == pytest.approx(expected, rel=1e-5) and expected > 0.1
  per_layer = [np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(grads['layers'][l])))
               for l in ('1', '2')]
  np.testing.assert_allclose(metrics['layer_grad_norm'], per_layer, rtol=1e-5)


def test_the_logged_rate_is_the_applied_one():
  """With b1 = b2 = 0 Adam's first update is the sign of the gradient, so that |dw| is the rate."""
  settings = config_lib.OptimizerConfig(lr=1e-2, b1=0.0, b2=0.0, eps=1e-30, warmup_steps=4)
  config = run(optimizer=settings)
  before, b = jax.device_get(jax.jit(lambda: step_lib.init_state(config, STEPS))()), ragged()
  for _ in range(3):
    after, metrics = step(config, b, state=before)
    moved = np.abs(after.params['head']['table'] - before.params['head']['table']).max()
    assert moved == pytest.approx(float(metrics['lr']), rel=1e-3, abs=1e-9)
    before = after
  assert float(metrics['lr']) == pytest.approx(5e-3)  # third update, count 2 of 4


@pytest.mark.parametrize('settings', [
    {'loop': 'unrolled'}, {'loop': 'scan'}, {'loop': 'scan', 'sliding_window': 4, 'window_layers': (6, 12)}], ids=str)
def test_statistics_equal_numpy(settings):
  """Of layers in their order: there are ten and more, whose names sort otherwise, and runs of unlike ones."""
  import lns_jax
  config = run(scheme='lns', num_layers=12, d_model=16, d_ff=32, **settings)
  state, b = jax.jit(lambda: step_lib.init_state(config, STEPS))(), batch(8)
  _, out = lns_jax.apply(config.model, state.params, b, taps=['embed', 'layers/*/*'])
  real = np.asarray(b['segment_ids'] > 0)
  _, metrics = step(config, b)
  streams = [out['embed'], *(out[f'layers/{l}/out'] for l in range(1, 13))]
  expected = [np.var(np.asarray(x, np.float64), axis=-1)[real].mean() for x in streams]
  np.testing.assert_allclose(metrics['variance'], expected, rtol=1e-4)
  rms = lambda x: np.sqrt(np.mean(np.square(np.asarray(x, np.float64)[real])))
  for sub in ('attn', 'mlp'):
    expected = [rms(out[f'layers/{l}/{sub}_branch']) / rms(out[f'layers/{l}/{sub}_x']) for l in range(1, 13)]
    np.testing.assert_allclose(metrics[f'{sub}_ratio'], expected, rtol=1e-4)


def test_statistics_change_no_number():
  a, _ = step(run(stats=0), ragged())
  b, metrics = step(run(stats=1), ragged())
  leaves_close(a.params, b.params, 1e-5)
  assert set(metrics) == {'finite', 'loss', 'tokens', 'grad_norm', 'lr', 'variance', 'attn_ratio', 'mlp_ratio',
                          'layer_grad_norm', 'layer_decrease', 'predicted_decrease'}


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_the_decrease_is_minus_gradient_times_update(loop):
  """By hand: Adam's first update with b1 = b2 = 0 and eps = 1 is -lr g / (|g| + 1), of clipped g too."""
  settings = config_lib.OptimizerConfig(lr=0.5, b1=0.0, b2=0.0, eps=1.0, clip_norm=0.5, schedule='constant')
  config, b = run(loop=loop, optimizer=settings), ragged()
  state = jax.jit(lambda: step_lib.init_state(config, STEPS))()
  def mean(p):
    total, (weight, _) = step_lib.loss_sums(config.model, p, b)
    return total / weight
  grads = jax.tree.map(lambda g: np.asarray(g, np.float64), layout.unstack(jax.jit(jax.grad(mean))(state.params)))
  norm = np.sqrt(sum(np.sum(g ** 2) for g in jax.tree.leaves(grads)))
  assert norm > 0.5
  def total(tree):
    clipped = [(g, g * 0.5 / norm) for g in jax.tree.leaves(tree)]
    return sum(np.sum(g * 0.5 * c / (np.abs(c) + 1)) for g, c in clipped)
  _, metrics = step(config, b)
  np.testing.assert_allclose(metrics['layer_decrease'], [total(grads['layers'][l]) for l in ('1', '2')], rtol=1e-4)
  assert float(metrics['predicted_decrease']) == pytest.approx(total(grads), rel=1e-4)


def test_the_predicted_decrease_is_that_of_the_loss_at_a_tiny_rate():
  with jax.enable_x64(True):
    settings = config_lib.OptimizerConfig(lr=1e-7, schedule='constant')
    config, b = run(optimizer=settings, precision='float64', scheme='lns'), ragged()
    first, metrics = step(config, b)
    _, later = step(config, b, state=first)
  assert float(metrics['loss'] - later['loss']) == pytest.approx(float(metrics['predicted_decrease']), rel=1e-3)
  assert 0 < np.sum(metrics['layer_decrease']) < metrics['predicted_decrease']


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_the_decrease_changes_no_bit_of_the_update(loop, monkeypatch):
  config = run(loop=loop, scheme='lns', clip=0.5)
  after, _ = step(config, ragged(), updates=2)
  monkeypatch.setattr(step_lib.stats, 'decrease', lambda *_: {'all': 0.0, 'layers': 0.0})
  without, _ = step(config, ragged(), updates=2)
  jax.tree.map(np.testing.assert_array_equal, after, without)


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_a_non_finite_step_leaves_the_state_alone(poison):
  config = run()
  state = jax.device_get(jax.jit(lambda: step_lib.init_state(config, STEPS))())
  state.params['layers']['1-2']['mlp']['down'] = np.full((2, 128, 64), poison, np.float32)
  after, metrics = step(config, ragged(), state=state)
  assert not (np.isfinite(metrics['loss']) and np.isfinite(metrics['grad_norm']))
  jax.tree.map(np.testing.assert_array_equal, after, state)


def test_master_parameters_are_float32_and_paper_bf16_is_all_bf16():
  for precision, dtype in (('bfloat16', 'float32'), ('paper_bf16', 'bfloat16')):
    state, metrics = step(run(precision=precision), ragged())
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {str(x.dtype) for x in jax.tree.leaves(state.params) + moments} == {dtype}
    assert np.isfinite(metrics['loss'])


@pytest.mark.parametrize('precision, sizes, tolerance', [('float32', (1, 1, 1), 1e-6), ('float64', (2, 2, 2), 1e-12)])
def test_a_run_takes_the_loss_in_chunks_and_the_same_step(precision, sizes, tolerance):
  import contextlib
  import pathlib
  from lns_jax.train.run import Run
  with jax.enable_x64(True) if precision == 'float64' else contextlib.nullcontext():
    base = run(precision=precision, mesh=sizes)
    config = dataclasses.replace(base, data=config_lib.DataConfig(seq_len=40))
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:math.prod(sizes)])
    results, programs = [], []
    for chunk in (-1, 0):
      c = dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunk=chunk))
      r = Run(c, mesh, STEPS, step_lib.state_shardings(mesh, c, STEPS), pathlib.Path(), None)
      programs.append(r.compile_train_step())
      results.append(programs[-1](r.fresh_state(), batch(8, 40)))
    assert programs[0].as_text().count(' while(') == programs[1].as_text().count(' while(') + 1
    (a, metrics), (b, other) = jax.device_get(results)
    assert float(metrics['loss']) == pytest.approx(float(other['loss']), rel=tolerance)
    leaves_close(a.params, b.params, tolerance)


def test_both_loops_take_the_same_step():
  a, metrics = step(run(scheme='mix', num_layers=4, loop='unrolled'), ragged(), updates=2)
  b, other = step(run(scheme='mix', num_layers=4), ragged(), updates=2)
  np.testing.assert_allclose(other['variance'], metrics['variance'], rtol=1e-5)
  np.testing.assert_allclose(other['layer_grad_norm'], metrics['layer_grad_norm'], rtol=1e-4)
  leaves_close(layout.unstack(b.params), a.params, 1e-5)


@pytest.mark.parametrize('parts', [1, 4])
def test_a_growing_factor_is_that_of_the_updates_so_far(parts):
  """ProRes: update number t + 1 sees min(t / (T l), 1)."""
  config, b = run(scheme='prores', prores_steps=4, accumulation=parts), batch(8)
  state = jax.device_get(jax.jit(lambda: step_lib.init_state(config, STEPS))())
  for t in (0, 3):
    _, metrics = step(config, b, state=state._replace(step=np.int32(t)))
    at = dataclasses.replace(config.model, ramp_step=t)
    total, (weight, _) = step_lib.loss_sums(at, state.params, b)
    assert float(metrics['loss']) == pytest.approx(float(total / weight), rel=1e-6)
    assert (metrics['attn_ratio'] == 0).all() == (t == 0)


def test_golden_step():
  """The only expectation here that comes from our own output.

  If you did not intend to change what a training step computes, a failure here may be a bug; if you did, run
  this test and copy the numbers that it prints.
  """
  config = dataclasses.replace(run(scheme='lns', num_layers=3), optimizer=config_lib.OptimizerConfig(
      name='adamw', lr=1e-2, weight_decay=0.1, clip_norm=1.0, warmup_steps=2))
  state, metrics = step(config, batch(8), updates=3)
  found = [float(metrics['loss']), float(metrics['grad_norm']), float(metrics['variance'][3]),
           float(np.sum(np.abs(state.params['layers']['1-3']['mlp']['down'][2])))]
  print(f'GOLDEN = {found}')
  np.testing.assert_allclose(found, GOLDEN, rtol=1e-4)


GOLDEN = [4.143107891082764, 1.7518285512924194, 0.8325049877166748, 655.0994873046875]
