"""Losses are sums and weights; a masked target is never read."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax import config as config_lib
from lns_jax import sharding
from lns_jax.aot import costs, hlo
from lns_jax.models import loss
from tiny import leaves_close


def test_uniform_logits_cost_the_log_of_the_vocabulary():
  found = loss.token_losses(jnp.zeros((1, 2, 32000)), jnp.array([[3, 31999]]), jnp.ones((1, 2)))
  np.testing.assert_allclose(found, 10.3734912, rtol=1e-6)


@pytest.mark.parametrize('ignored', [-100, -1, 10, 2**31 - 1])
def test_an_ignored_label_is_not_read(ignored):
  """Known fault S6: optax gives NaN for -100 and the last class for -1."""
  def total(logits):
    return jnp.sum(loss.token_losses(logits, jnp.array([[3, ignored]]), jnp.array([[1.0, 0.0]])))
  value, grad = jax.value_and_grad(total)(jnp.zeros((1, 2, 10)))
  assert float(value) == pytest.approx(2.3025851) and np.isfinite(grad).all() and (grad[0, 1] == 0).all()


@pytest.mark.parametrize('label', [-1, -100, 10])
def test_a_weighed_label_outside_of_the_vocabulary_is_never_a_number(label):
  """Known fault S6: -1 must not score as the last class (0.4586296)."""
  found = loss.token_losses(jnp.arange(10.0)[None, None], jnp.array([[label]]), jnp.ones((1, 1)))
  assert np.isnan(found).all()
  last = loss.token_losses(jnp.arange(10.0)[None, None], jnp.array([[9]]), jnp.ones((1, 1)))
  np.testing.assert_allclose(last, 0.4586296, rtol=1e-6)


def test_weights_are_real_tokens_or_as_given():
  batch = {'segment_ids': jnp.array([[1, 2, 0]])}
  np.testing.assert_array_equal(loss.weights(batch), [[1, 1, 0]])
  np.testing.assert_array_equal(loss.weights(batch | {'weights': jnp.array([[0.0, 1.0, 0.0]])}), [[0, 1, 0]])


def test_mean_of_nothing_is_zero():
  assert float(loss.mean(jnp.float32(0), jnp.float32(0))) == 0
  assert float(loss.mean(jnp.float32(7), jnp.float32(4))) == 1.75


@pytest.mark.parametrize('chunk', [1, 4, 5, 12, 100])
def test_chunks_change_neither_loss_nor_gradient(chunk):
  rng = np.random.default_rng(0)
  x, table = rng.normal(size=(3, 12, 8)), rng.normal(size=(50, 8))
  targets, w = rng.integers(0, 50, (3, 12)), rng.uniform(size=(3, 12)) * (rng.uniform(size=(3, 12)) > 0.3)
  targets[w == 0] = -100
  with jax.enable_x64(True):
    x, table, w = jnp.asarray(x), jnp.asarray(table), jnp.asarray(w, jnp.float32)  # as a float64 run has them
    def total(x, table, chunk):
      return 3 * loss.summed_loss(x, table, targets, w, chunk)
    expected, found = (jax.value_and_grad(total, (0, 1))(x, table, c) for c in (0, chunk))
    assert float(total(x, table, chunk)) == pytest.approx(float(expected[0]), rel=1e-12)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_bf16_chunks_keep_the_types():
  x, table = jnp.ones((2, 8, 4), jnp.bfloat16), jnp.ones((10, 4), jnp.float32)
  value, (dx, dt) = jax.value_and_grad(lambda x, t: loss.summed_loss(x, t, jnp.ones((2, 8), int), jnp.ones((2, 8)), 4),
                                       (0, 1))(x, table)
  assert value.dtype == jnp.float32 and dx.dtype == jnp.bfloat16 and dt.dtype == jnp.float32


def example(B=8, T=12, D=16, V=50):
  """x, table, targets, weights in float64: some of weight 0, whose targets are not to be read."""
  rng = np.random.default_rng(0)
  targets, w = rng.integers(0, V, (B, T)), rng.uniform(size=(B, T)) * (rng.uniform(size=(B, T)) > 0.3)
  targets[w == 0] = -100
  return rng.normal(size=(B, T, D)), rng.normal(size=(V, D)), targets, w


def on_mesh(sizes, x, table, targets, w, chunk):
  """(loss, gradients by x and table), times 3, with x and table where a run has them."""
  settings = config_lib.MeshConfig(**{'data': 1, 'fsdp': 1, **sizes})
  mesh = sharding.make_mesh(settings, jax.devices()[:np.prod(list(sizes.values()))])
  where = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
  placed = where(sharding.ROWS, 'sequence') if len(x) % sharding.batch_parts(mesh) == 0 else where()
  def total(x, table):
    return 3 * loss.summed_loss(x, table, targets, w, chunk)
  with sharding.use(mesh):
    f = jax.jit(jax.value_and_grad(total, (0, 1)), in_shardings=(placed, where('tensor', 'fsdp')))
    f = f.lower(x, table).compile()
    return f(x, table), jax.jit(total)(x, table), jax.make_jaxpr(jax.grad(total, (0, 1)))(x, table), f


MESHES = [{'data': 8}, {'fsdp': 4, 'tensor': 2}, {'data': 2, 'sequence': 4}, {'fsdp': 2, 'sequence': 2, 'tensor': 2},
          {'stage': 8}, {'data': 2, 'stage': 2, 'sequence': 2}]


@pytest.mark.parametrize('precision, tolerance', [
    ('float64', 1e-12), pytest.param('float32', 1e-6, marks=pytest.mark.slow)])
@pytest.mark.parametrize('sizes', MESHES)
def test_chunks_on_a_mesh_equal_the_plain_loss_of_one_device(sizes, precision, tolerance):
  """Two positions a chunk; the last chunk of three positions a device is filled up, and 12 positions over 8 stages."""
  with jax.enable_x64(precision == 'float64'):
    x, table, targets, w = (jnp.asarray(v, precision if v.dtype == float else int) for v in example())
    expected = jax.value_and_grad(lambda x, t: 3 * loss.summed_loss(x, t, targets, w), (0, 1))(x, table)
    found, value, *_ = on_mesh(sizes, x, table, targets, w, 2)
    assert float(value) == pytest.approx(float(expected[0]), rel=tolerance)
    leaves_close(found, expected, tolerance)


@pytest.mark.parametrize('sizes', [MESHES[0], MESHES[3]])
def test_in_bfloat16_the_gradient_of_the_table_is_sent_in_it(sizes):
  """Summed over a device's own tokens in float32, rounded, and summed over devices."""
  x, table, targets, w = (jnp.asarray(v, jnp.float32 if v.dtype == float else int) for v in example())
  x = x.astype(jnp.bfloat16)
  expected = jax.value_and_grad(lambda x, t: 3 * loss.summed_loss(x, t, targets, w), (0, 1))(x, table)
  (value, (dx, dt)), _, jaxpr, _ = on_mesh(sizes, x, table, targets, w, 2)
  assert float(value) == pytest.approx(float(expected[0]), rel=1e-5) and dt.dtype == jnp.float32
  leaves_close((dx, dt), expected[1], 2e-2)
  mapped = next(e for e in jaxpr.eqns if e.primitive.name == 'shard_map').params['jaxpr']
  # Reductions over devices of what is as large as the table: no scalar, no gradient of the stream.
  sent = [v.aval.dtype for e in mapped.eqns if e.primitive.name in ('reduce_scatter', 'psum', 'psum_invariant')
          for v in e.invars if v.aval.ndim == 2]
  assert len(sent) >= 2 and set(sent) == {jnp.dtype(jnp.bfloat16)}


def products(sizes) -> int:
  """FLOPs of a device in the loss and its gradient."""
  found = on_mesh(sizes, *(jnp.asarray(v, jnp.float32 if v.dtype == float else int) for v in example(T=32)), 2)[3]
  program = hlo.parse(found.as_text())
  return sum(times * costs.flops(program, i, computation) for i, computation, times in program.executed())


def test_stages_share_the_products_of_the_head():
  """By hand: three products of 8 rows of 32 positions, D = 16 and V = 50."""
  assert products({'stage': 4}) == products({'data': 2, 'stage': 2}) == 3 * 2 * 8 * 32 * 16 * 50 // 4


def test_rows_that_do_not_divide_over_the_mesh_are_the_partitioners():
  x, table, targets, w = (jnp.asarray(v, jnp.float32 if v.dtype == float else int) for v in example(B=3))
  expected = jax.value_and_grad(lambda x, t: 3 * loss.summed_loss(x, t, targets, w), (0, 1))(x, table)
  leaves_close(on_mesh({'data': 2, 'tensor': 2}, x, table, targets, w, 5)[0], expected, 1e-5)


@pytest.mark.parametrize('label, finite', [(-1, False), (50, False), (-100, True)])
def test_labels_on_a_split_vocabulary_are_read_as_on_a_whole_one(label, finite):
  """A weighed label outside of the vocabulary is no number; one that weighs nothing is not read."""
  x, table, targets, w = (jnp.asarray(v, jnp.float32 if v.dtype == float else int) for v in example())
  targets, w = targets.at[0, 0].set(label), w.at[0, 0].set(0.0 if finite else 1.0)
  assert np.isfinite(on_mesh(MESHES[3], x, table, targets, w, 2)[1]) == finite


def test_the_table_is_gathered_and_its_gradient_reduced_once_and_not_for_every_chunk():
  x, table, targets, w = (jnp.asarray(v, jnp.float32 if v.dtype == float else int) for v in example())
  jaxpr = on_mesh(MESHES[3], x, table, targets, w, 1)[2]
  mapped = next(e for e in jaxpr.eqns if e.primitive.name == 'shard_map').params['jaxpr']
  found = [e.primitive.name for e in mapped.eqns]
  assert found.count('all_gather') == found.count('reduce_scatter') == found.count('scan') == 1
  body = str(next(e for e in mapped.eqns if e.primitive.name == 'scan').params['jaxpr'])
  assert not {'all_gather', 'reduce_scatter', 'all_to_all', 'ppermute'} & set(re.findall(r' = (\w+)', body))
  over = re.findall(r' = (?:psum|pmax)\w*\[\s*axes=\((.*?)\)', body)
  assert len(over) == 3 and {axes.strip(",'") for axes in over} == {'tensor'}  # of the logsumexp and the target's logit


@pytest.mark.parametrize('platform, B, V, tokens', [
    ('cpu', 4, 32000, 4 * 32), ('tpu', 4, 32000, 4196), ('tpu', 16, 256000, 1024), ('tpu', 3, 128256, 1047)])
def test_the_size_of_a_chunk(platform, B, V, tokens, monkeypatch):
  """By hand: 2^27 / 32000 = 4194.3 tokens, rounded up to whole positions of 4 rows; 2^27 / 128256 = 1046.5 of 3."""
  monkeypatch.setattr(loss.mesh, 'platform', lambda: platform)
  assert B * loss._positions(B, V) == tokens
