"""int8 weights: every entry by hand, the function of the dequantised matrices, and what takes them or refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax import runs, sharding
from lns_jax.config import MeshConfig
from lns_jax.depth import theory
from lns_jax.errors import UserError
from lns_jax.interop import quantise
from lns_jax.layers import param
from lns_jax.models import decode, layout, transformer
from lns_jax.train import loop
from test_cli import command
from tiny import batch, leaves_close, model
from tiny import params as tiny_params
from train.test_loop import settings, text  # noqa: F401: a fixture

BATCH = batch(rows=2, T=8)
SUMMED = {'q': (0,), 'k': (0,), 'v': (0,), 'o': (0, 1), 'gate': (0,), 'up': (0,), 'down': (0,)}


def tiny(**changes):
  return model(**{'scheme': 'lns', 'num_layers': 3, 'd_model': 32, 'd_ff': 48, 'bias': 'all', **changes})


@functools.cache
def _params(config):
  return tiny_params(config)


def params(config):
  """Of the config's layout; drawn once."""
  return layout.native(_params(dataclasses.replace(config, loop='unrolled')), config)


def dequantised(p):
  """Float matrices in place of int8 ones."""
  return jax.tree.map(param.dense, p, is_leaf=param.is_quantised)


def matrices(p) -> dict:
  """{'layers/2/attn/q': matrix} of the blocks."""
  found = jax.tree_util.tree_leaves_with_path(layout.unstack(p)['layers'], is_leaf=param.is_quantised)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): w for path, w in found if path[-1].key in SUMMED}


FORWARD = jax.jit(transformer.forward, static_argnums=0)


def logits(config, p):
  return np.asarray(FORWARD(config, p, BATCH['tokens'], segment_ids=BATCH['segment_ids']))


def check(q, w, name: str):
  """127 steps to either side of a channel's largest entry, and of these each entry has the nearest."""
  w = np.asarray(w, np.float64)
  scale = np.abs(w).max(axis=SUMMED[name.split('/')[-1]], keepdims=True) / 127
  assert q.qvalue.dtype == jnp.int8 and q.scale.dtype == jnp.float32 and q.scale.shape == scale.shape
  np.testing.assert_allclose(q.scale, scale, rtol=1e-6)
  values = np.asarray(q.qvalue, np.float64)
  np.testing.assert_array_equal(values, np.round(w.astype(np.float32) / np.asarray(q.scale)))  # ties to the even
  assert np.abs(values - w / scale).max() <= 0.5 + 1e-4 and np.abs(values).max() == 127
  off = np.abs(w - np.asarray(param.dense(q), np.float64))
  assert (off <= scale / 2 * (1 + 1e-4)).all() and off.max() > 0.4 * scale.min()


def test_every_entry_by_hand():
  p = params(tiny(loop='scan', num_layers=2))
  whole, small = matrices(p), matrices(quantise.int8(p))
  assert len(small) == 2 * 7
  for name, w in whole.items():
    check(small[name], w, name)


def test_bfloat16_weights_are_quantised_in_float32():
  """A division in bfloat16 would be off by half a step, and a scale by 0.4 %."""
  p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(tiny(loop='scan', num_layers=2)))
  for name, q in matrices(quantise.int8(p)).items():
    check(q, matrices(p)[name], name)


def of_one(w):
  """int8 of a single [F, D] matrix."""
  return quantise.int8({'layers': {'1': {'mlp': {'down': jnp.asarray(w, jnp.float32)}}}})['layers']['1']['mlp']['down']


def test_a_channel_of_zeros_and_the_largest_of_either_sign():
  w = np.array([[127.0, -127.0, 0.0, 254.0], [0.4, -0.6, 0.0, 1.1], [1.6, -1.4, 0.0, -3.1], [2.4, -2.6, 0.0, -254.0]])
  q, opposite = of_one(w), of_one(-w)
  np.testing.assert_array_equal(q.qvalue, [[127, -127, 0, 127], [0, -1, 0, 1], [2, -1, 0, -2], [2, -3, 0, -127]])
  np.testing.assert_allclose(q.scale, [[1, 1, 1, 2]], rtol=1e-6)
  np.testing.assert_array_equal(opposite.qvalue, -q.qvalue)


@pytest.mark.parametrize('factor', [2.0 ** -7, 2.0 ** -2, 3.0])
def test_a_factor_on_a_matrix_moves_its_scales_and_no_value(factor):
  """So that how small a scheme's factor is makes no difference to matrices of 8 bits that it was folded into."""
  w = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
  small, large = of_one(w * np.float32(factor)), of_one(w)
  np.testing.assert_array_equal(small.qvalue, large.qvalue)
  np.testing.assert_allclose(small.scale, large.scale * factor, rtol=1e-6)


@pytest.mark.parametrize('changes', [
    {}, {'loop': 'scan'}, {'mlp': 'gelu', 'norm': 'layernorm', 'precision': 'bfloat16'}])
def test_int8_matrices_are_the_model_of_the_dequantised_ones(changes):
  config = tiny(**changes)
  p = params(config)
  small = quantise.int8(p)
  found, expected, before = logits(config, small), logits(config, dequantised(small)), logits(config, p)
  far = lambda a, b: np.abs(a - b).max() / np.abs(b).max()
  assert far(found, expected) <= 1e-6
  assert 1e-4 < far(found, before) < 0.05
  leaves_close(dequantised(quantise.int8(small)), dequantised(small), 0)


def test_both_loops_agree_in_every_layout():
  scan, unrolled = tiny(loop='scan'), tiny()
  small = quantise.int8(params(unrolled))
  stacked = layout.native(small, scan)
  leaves_close(stacked, quantise.int8(params(scan)), 0)
  leaves_close(layout.unstack(stacked), small, 0)
  np.testing.assert_allclose(logits(scan, stacked), logits(unrolled, small), rtol=1e-5, atol=1e-5)


def test_a_removed_layer_takes_its_scales_with_it():
  config = tiny(loop='scan')
  p = params(config)
  less, found = transformer.remove_layers(config, quantise.int8(p), [2])
  _, expected = transformer.remove_layers(config, p, [2])
  leaves_close(found, quantise.int8(expected), 0)
  assert logits(less, found).shape == logits(config, p).shape


def test_matrices_take_a_quarter_of_the_memory():
  """One byte an entry and four a channel, for four an entry."""
  D, F, K = 512, 1024, 256
  config = tiny(d_model=D, d_ff=F, num_layers=1, bias='none')
  whole = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
  small = jax.eval_shape(quantise.int8, whole)
  size = lambda p: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(p))
  entries, channels = 2 * D * D + 2 * D * K + 3 * D * F, (D + 2 * K + D) + (2 * F + D)
  assert size(whole) - size(small) == 4 * entries - (entries + 4 * channels)
  assert 3.97 < size(matrices(whole)) / size(matrices(small)) < 4


def test_sharded_matrices_give_the_numbers_of_one_device():
  config = tiny(loop='scan', bias='none')
  p = params(config)
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
  with sharding.use(mesh):
    small = quantise.int8(jax.device_put(p, sharding.params(mesh, config)))
    found = logits(config, small)
  leaves_close(small, quantise.int8(p), 1e-6)
  of_up = small['layers']['1-3']['mlp']['up'].qvalue.sharding
  assert len(of_up.device_set) == 4 and not of_up.is_fully_replicated
  np.testing.assert_allclose(found, logits(config, quantise.int8(p)), rtol=1e-4, atol=1e-4)


def test_measures_of_depth_see_the_dequantised_model():
  config = tiny(scheme='pre')
  small = quantise.int8(params(config))
  same = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  same(*(lns_jax.depth.variance(config, q, [BATCH]).value for q in (small, dequantised(small))))
  same(*(theory.constants(config, q, 8).sigma for q in (small, dequantised(small))))


def test_decoding_with_a_cache_gives_the_logits_of_the_whole_row():
  config = tiny(loop='scan')
  small = quantise.int8(params(config))
  _, cache = decode.extend(config, small, BATCH['tokens'][:, :7], decode.init(config, 2, 8))
  last, _ = decode.extend(config, small, BATCH['tokens'][:, 7:], cache)
  whole = transformer.forward(config, small, BATCH['tokens'])
  np.testing.assert_allclose(last[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)


def test_gradients_are_refused():
  config = tiny()
  small = quantise.int8(params(config))
  with pytest.raises(UserError, match='int8'):
    lns_jax.depth.gradients(config, small, [BATCH])
  with pytest.raises(TypeError, match='int8'):
    jax.grad(lambda q: jnp.sum(transformer.forward(config, q, BATCH['tokens'])))(small)


@pytest.fixture(scope='module')
def run(text, tmp_path_factory):  # noqa: F811
  workdir = tmp_path_factory.mktemp('int8') / 'run'
  loop.train(settings(text, train={'steps': 30, 'layer_stats_every': 0}), workdir)
  return workdir


@pytest.mark.slow
def test_the_loss_of_a_run_in_int8_is_near_its_own_on_the_same_rows(run):
  before, found = runs.evaluate(run), runs.evaluate(run, int8=True)
  assert before['loss'] < 4.5  # of a uniform guess's 5.55: it has learned something that could be lost
  assert found['quantise'] == 'int8' and found['tokens'] == before['tokens'] and found['step'] == 30
  assert found['unquantised_loss'] == pytest.approx(before['loss'], rel=1e-6)
  assert found['difference'] == pytest.approx(found['loss'] - found['unquantised_loss'], abs=1e-6)
  assert 0 < abs(found['difference']) < 0.01
  low, high = found['difference_interval']
  assert low <= found['difference'] <= high and high - low < 0.01
  assert found['parameter_bytes'] < found['unquantised_parameter_bytes']
  assert not {'quantise', 'difference'} & set(before)


@pytest.mark.slow
def test_the_command_knows_int8_alone(run):
  bad = command('experiments/evaluate.py', f'--workdir={run}', '--quantise=int4')
  assert bad.returncode == 1 and 'int8' in bad.stderr and len(bad.stderr.splitlines()) == 1
