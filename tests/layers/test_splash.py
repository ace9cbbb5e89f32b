"""The kernel computes what plain attention does, step by step on a CPU; and where it is taken, and why."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lns_jax import sharding
from lns_jax.config import MeshConfig
from lns_jax.errors import UserError
from lns_jax.layers import attention, splash
from tiny import leaves_close, model


def inputs(T, H, K, h, rows=2):
  """q, k, v, a gradient, and segments: two documents and padding of other lengths in each row, in the last only that."""
  rng = np.random.default_rng(0)
  q, k, v, g = (jnp.asarray(rng.normal(size=(rows, T, n, h)), jnp.float32) for n in (H, K, K, H))
  ids = np.ones((rows, T), np.int32)
  for r in range(rows):
    ids[r, T // 3 + r:] = 2
    ids[r, T - 37 * (r + 1):] = 0
  ids[-1] = 0
  return q, k, v, g, jnp.asarray(ids)


def with_gradients(f, q, k, v, g):
  def both(q, k, v):
    y, pull = jax.vjp(f, q, k, v)
    return (y, *pull(g))
  return jax.device_get(jax.jit(both)(q, k, v))


def plain(config, ids, *qkvg):
  """Values and gradients of plain attention in float64."""
  with jax.enable_x64(True):
    ctx = attention.Context(ids, None, None)
    return with_gradients(lambda q, k, v: attention.attend(q, k, v, attention.mask(config, ctx, q.shape[1], 1)),
                          *(np.asarray(x, np.float64) for x in qkvg))


def kernel(config, ids):
  return lambda q, k, v: splash.attend(config, 1, q, k, v, ids, interpret=True)


ALONE, SPLIT = {}, {'data': 2, 'sequence': 2, 'tensor': 2}


@pytest.mark.parametrize('T, h, K, settings, mesh', [
    (128, 128, 4, {}, ALONE), (256, 64, 2, {'sliding_window': 70}, SPLIT), (256, 64, 1, {'causal': False}, ALONE),
    pytest.param(256, 64, 2, {}, ALONE, marks=pytest.mark.slow),
    pytest.param(256, 64, 2, {'sliding_window': 70}, ALONE, marks=pytest.mark.slow),
    pytest.param(256, 128, 2, {}, SPLIT, marks=pytest.mark.slow),
    pytest.param(256, 64, 2, {'causal': False}, SPLIT, marks=pytest.mark.slow),
    pytest.param(512, 64, 1, {'sliding_window': 200}, {'data': 2, 'sequence': 4}, marks=pytest.mark.slow),
    pytest.param(128, 64, 2, {}, {'fsdp': 4, 'tensor': 2}, marks=pytest.mark.slow)])
def test_values_and_gradients_are_those_of_plain_attention(T, h, K, settings, mesh):
  config = model(head_dim=h, num_kv_heads=K, **settings)
  *qkvg, ids = inputs(T, 4, K, h, rows=4)
  expected = plain(config, ids, *qkvg)
  if mesh:
    with sharding.use(sharding.make_mesh(MeshConfig(**{'data': 1, **mesh}))):
      found = with_gradients(kernel(config, ids), *qkvg)
  else:
    found = with_gradients(kernel(config, ids), *qkvg)
  assert all(np.isfinite(x).all() for x in found)  # of padding too
  leaves_close(found, expected, 1e-6)


def test_inside_of_a_pipeline_the_other_axes_are_left_to_it():
  config, stage = model(head_dim=64), PartitionSpec('stage')
  *qkvg, _ = inputs(128, 4, 2, 64)
  expected = plain(config, None, *qkvg)
  def staged(q, k, v):  # the same on both stages
    run = jax.shard_map(lambda *x: kernel(config, None)(*x)[None], in_specs=PartitionSpec(), out_specs=stage,
                        axis_names={'stage'}, check_vma=False)
    return jnp.mean(run(q, k, v), axis=0)
  with sharding.use(sharding.make_mesh(MeshConfig(data=2, stage=2, tensor=2))):
    leaves_close(with_gradients(staged, *qkvg), expected, 1e-6)


@pytest.mark.parametrize('settings', [{}, {'causal': False}, {'sliding_window': 1}, {'sliding_window': 5},
                                      {'sliding_window': 16}, {'sliding_window': 3, 'window_layers': (1,)}])
def test_the_kernels_mask_is_that_of_attention(settings):
  config = model(**settings)
  for layer in (1, 2):
    expected = attention.mask(config, attention.Context(None, None, None), 16, layer)[0]
    np.testing.assert_array_equal(splash.mask(config, 16, layer)[:, :], expected)


def test_blocks_divide_keys_and_queries():
  sizes = splash.blocks(1024, 1024)
  assert (sizes.block_q, sizes.block_kv, sizes.block_q_dkv, sizes.block_kv_dq) == (512,) * 4
  sizes = splash.blocks(1152, 384)
  assert (sizes.block_q, sizes.block_kv) == (128, 128)
  sizes = splash.blocks(2048, 256)
  assert (sizes.block_q, sizes.block_kv) == (256, 512)


BF16 = {'precision': 'bfloat16', 'head_dim': 64}


@pytest.mark.parametrize('T, platform, settings, name, why', [
    (2048, 'tpu', {}, 'splash', 'rows of 2048 tokens and heads of 64 in bfloat16'),
    (512, 'tpu', {'head_dim': 128}, 'splash', 'suit the kernel'),
    (256, 'tpu', {}, 'xla', 'scores of 256 tokens are small'),
    (2048, 'cpu', {}, 'xla', 'not for a cpu'),
    (2048, 'tpu', {'precision': 'float32'}, 'xla', 'float32 numbers less exactly'),
    (2000, 'tpu', {}, 'xla', '2000 tokens of a row on a device are no multiple of 128'),
    (2048, 'tpu', {'head_dim': 16}, 'xla', 'heads of 16 leave most'),
    (2048, 'tpu', {'attention': 'xla'}, 'xla', 'asks for it'),
    (128, 'tpu', {'attention': 'splash'}, 'splash', 'asks for it'),
    (128, 'cpu', {'attention': 'splash'}, 'xla', 'not for a cpu')])
def test_the_choice_and_its_reason(T, platform, settings, name, why):
  config = model(**{**BF16, **settings})
  with sharding.use(sharding.make_mesh(MeshConfig())):
    found, reason = splash.choose(config, T, platform)
    assert found == name and why in reason
    if config.attention == 'splash' and name == 'xla':
      with pytest.raises(UserError, match='model.attention = splash cannot be here: the kernel is for TPUs'):
        splash.describe(config, T, platform)
    else:
      assert splash.describe(config, T, platform) == f'attention: {name} ({reason})'


def test_several_devices_need_a_mesh_and_enough_tokens_each():
  config = model(**BF16)
  assert splash.choose(config, 2048, 'tpu') == ('xla', 'no mesh in force says how several devices share the rows')
  with sharding.use(sharding.make_mesh(MeshConfig(data=1, sequence=8))):
    assert splash.choose(config, 1024, 'tpu')[0] == 'splash'
    assert '64 tokens of a row on a device' in splash.choose(config, 512, 'tpu')[1]


def test_what_is_computed_in_float32_is_computed_by_products():
  config = dataclasses.replace(model(**BF16), attention='splash')  # as the Jacobians of a bfloat16 model
  with sharding.use(sharding.make_mesh(MeshConfig())):
    assert splash.choose(config, 2048, 'tpu')[0] == 'splash'
    assert splash.choose(config, 2048, 'tpu', jnp.dtype('float32'))[0] == 'xla'
