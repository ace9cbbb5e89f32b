"""Products in 8-bit floats: their values, what is rounded and what is not, where they are offered."""

import dataclasses
import re
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lns_jax import config as config_lib
from lns_jax import sharding
from lns_jax.errors import UserError
from lns_jax.layers import fp8
from lns_jax.models import decode, layout, loss, transformer
from tiny import batch, leaves_close, model, params

EIGHT = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
EQUATIONS = {'BTD,DHh->BTHh': (6, 2, 4), 'BTHh,HhD->BTD': (2, 3, 5), 'BTD,DF->BTF': (6, 7)}


def rounded(x, over, dtype):
  """(x with its 8 bits, the scales) by numpy: each group's largest entry becomes the type's largest number."""
  x = np.asarray(x, np.float32)
  top = np.float32(ml_dtypes.finfo(dtype).max)
  scale = np.abs(x).max(axis=over, keepdims=True) / top
  return (x / scale).astype(dtype).astype(np.float64), scale.astype(np.float64)


def operands(equation, seed=0):
  rng, shape = np.random.default_rng(seed), EQUATIONS[equation]
  x = rng.normal(size=(2, 3, *(shape[:2] if equation == 'BTHh,HhD->BTD' else shape[:1])))
  x *= 10.0 ** rng.uniform(-3, 3, (2, 3, *(1,) * (x.ndim - 2)))  # tokens of very different sizes
  return x.astype(np.float32), rng.normal(size=shape).astype(np.float32)


def axes_over(equation):
  """Axes of x, and of w, that are summed over."""
  x, w, y = re.split(',|->', equation)
  return tuple(i for i, a in enumerate(x) if a not in y), tuple(i for i, a in enumerate(w) if a not in y)


@pytest.mark.parametrize('equation', EQUATIONS)
def test_a_product_is_that_of_the_rounded_numbers(equation):
  x, w = operands(equation)
  (x8, sx), (w8, sw) = (rounded(a, over, EIGHT[0]) for a, over in zip((x, w), axes_over(equation)))
  wanted = np.einsum(equation, x8 * sx, w8 * sw)
  np.testing.assert_allclose(fp8.einsum(equation, x, w), wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


def test_gradients_are_those_of_the_rounded_numbers_and_near_the_plain_ones():
  """A scale that lies along a summed axis goes over to the gradient before that is rounded to 8 bits."""
  x, w = operands('BTD,DF->BTF')
  g = np.random.default_rng(1).normal(size=(2, 3, 7)).astype(np.float32)
  dx, dw = jax.vjp(lambda x, w: fp8.einsum('BTD,DF->BTF', x, w), x, w)[1](g)
  (x8, sx), (w8, sw) = rounded(x, 2, EIGHT[0]), rounded(w, 0, EIGHT[0])
  (g8, sg) = rounded(g * sw.astype(np.float32), 2, EIGHT[1])
  np.testing.assert_allclose(dx, np.einsum('BTF,DF->BTD', g8 * sg, w8), rtol=1e-4, atol=1e-5)
  (g8, sg) = rounded(g * sx.astype(np.float32), (0, 1), EIGHT[1])
  wanted = np.einsum('BTD,BTF->DF', x8, g8 * sg)
  np.testing.assert_allclose(dw, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
  plain = jax.vjp(lambda x, w: jnp.einsum('BTD,DF->BTF', x, w), x, w)[1](g)
  for found, right in zip((dx, dw), plain):
    # Each number of e5m2 is off by 1/8 of itself at most, each of e4m3 by 1/16.
    assert np.linalg.norm(found - right) < (1 / 8 + 1 / 16) * np.linalg.norm(right)


def test_zeros_stay_zeros_and_types_what_they_were():
  x, w = jnp.zeros((1, 2, 6), jnp.bfloat16), jnp.zeros((6, 7), jnp.float32)
  y, pull = jax.vjp(lambda x, w: fp8.einsum('BTD,DF->BTF', x, w), x, w)
  found = (y, *pull(jnp.zeros_like(y)))
  assert [f.dtype for f in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
  assert all((f == 0).all() for f in found)


def loss_of(config, p, b):
  logits = transformer.forward(config, p, b['tokens'], segment_ids=b['segment_ids'])
  return jnp.mean(loss.token_losses(logits, b['targets'], loss.weights(b)))


def gradient(config, p, b):
  return jax.jit(jax.value_and_grad(loss_of, argnums=1), static_argnums=0)(config, p, b)


SMALL = dict(scheme='lns', num_layers=3, d_model=16, d_ff=24, num_heads=2, num_kv_heads=2, matmul='fp8')


@pytest.mark.slow
@pytest.mark.parametrize('settings', [
    {'loop': 'scan', 'remat': 'full'}, {'remat': 'full'}, {'loop': 'scan'}])
def test_loops_and_recomputing_change_nothing_that_rounding_does_not(settings):
  config, b = model(**SMALL), batch()
  p = params(config)
  value, grads = gradient(config, p, b)
  plain = jax.jit(loss_of, static_argnums=0)(model(**SMALL | {'matmul': 'plain'}), p, b)
  assert 1e-6 < abs(plain / value - 1) < 0.02
  other = model(**SMALL, **settings)
  found, back = gradient(other, layout.native(p, other), b)
  np.testing.assert_allclose(found, value, rtol=1e-5)
  # A number half-way between two of 8 bits may fall to either side.
  leaves_close(layout.unstack(back), grads, 0.02)


@pytest.mark.slow
def test_devices_change_nothing_that_rounding_does_not():
  config, b = model(**SMALL, loop='scan'), batch()
  p = params(config)
  value, grads = gradient(config, p, b)
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=2, fsdp=2, tensor=2))
  with sharding.use(mesh):
    placed = jax.device_put(p, sharding.params(mesh, config)), jax.device_put(b, sharding.batch(mesh))
    found, back = gradient(config, *placed)
  np.testing.assert_allclose(found, value, rtol=1e-4)
  leaves_close(back, grads, 0.03)


def test_a_token_depends_on_no_later_one_and_on_no_other_row():
  config = model(**SMALL)
  p, tokens = params(config), batch(segments=False)['tokens']
  forward = jax.jit(lambda t: transformer.forward(config, p, t))
  changed = tokens.copy()
  changed[0, 9:] = 7
  changed[1] = 8
  before, after = np.asarray(forward(tokens)), np.asarray(forward(changed))
  np.testing.assert_array_equal(after[0, :9], before[0, :9])
  np.testing.assert_array_equal(after[2:], before[2:])
  assert (after[0, 9:] != before[0, 9:]).any()


def test_decoding_with_a_cache_gives_what_the_whole_model_gives():
  config = model(**SMALL)
  p, tokens = params(config), batch(2, 6, segments=False)['tokens']
  whole = jax.jit(transformer.forward, static_argnums=0)(config, p, tokens)
  extend = jax.jit(decode.extend, static_argnums=0)
  cache, found = decode.init(config, 2, 6), []
  for n in (4, 1, 1):
    logits, cache = extend(config, p, tokens[:, len(found):len(found) + n], cache)
    found += list(np.moveaxis(np.asarray(logits), 1, 0))
  np.testing.assert_allclose(np.stack(found, 1), whole, atol=2e-3 * np.abs(whole).max())


def equations(jaxpr):
  for eqn in jaxpr.eqns:
    inner = [e for v in eqn.params.values() for e in jax.tree.leaves(v, is_leaf=lambda j: hasattr(j, 'jaxpr'))
             if hasattr(e, 'jaxpr')]
    yield from (e for j in inner for e in equations(j.jaxpr)) if inner else [eqn]


def is_8_bits(atom):
  return getattr(atom.aval, 'dtype', jnp.float32) in (jnp.float8_e4m3fn, jnp.float8_e5m2)


def test_what_has_8_bits_goes_into_products_and_nowhere_else():
  """So factor, gain, statistics and sums are not of 8 bits, nor does a factor follow the rounding (seed 2, 3.2)."""
  config = model(**SMALL, precision='bfloat16')
  p, b = params(config), batch()
  found = list(equations(jax.make_jaxpr(jax.grad(lambda p: loss_of(config, p, b)))(p).jaxpr))
  readers = [e for e in found if any(map(is_8_bits, e.invars))]
  assert {e.primitive.name for e in readers} <= {'dot_general', 'transpose', 'stop_gradient', 'copy'}
  products = [e for e in readers if e.primitive.name == 'dot_general']
  assert len(products) == 3 * 7 * config.num_layers  # forward, and back to tokens and to matrices
  assert all(all(map(is_8_bits, e.invars)) and e.outvars[0].aval.dtype == jnp.float32 for e in products)
  vectors = [e for e in found if any(is_8_bits(v) and v.aval.ndim < 2 for v in e.outvars)]
  assert not vectors


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_the_factors_are_float32_constants_beside_8_bit_products(loop):
  config = model(**SMALL, precision='bfloat16', loop=loop)
  text = jax.jit(lambda p, b: loss_of(config, p, b)).lower(params(config), batch()).as_text()
  assert 'f8E4M3FN' in text
  scalars = {np.float32(v) for v in re.findall(r'dense<([-+.0-9eE]+)> : tensor<f32>', text)}
  vector = 'dense<[1.000000e+00, 0.707106769, 0.577350259]> : tensor<3xf32>'
  assert vector in text if loop == 'scan' else {np.float32(2 ** -0.5), np.float32(3 ** -0.5)} <= scalars


class Chip(types.SimpleNamespace):
  """What jax tells of a device."""


@pytest.mark.parametrize('chip', [
    Chip(platform='tpu', device_kind=k) for k in ('TPU v4', 'TPU v5 lite', 'TPU v5p', 'TPU v6 lite')] + [
    Chip(platform='gpu', device_kind='NVIDIA A100-SXM4-40GB', compute_capability='8.0')], ids=lambda c: c.device_kind)
def test_chips_without_8_bit_floats_are_refused(chip):
  with pytest.raises(UserError, match=f'fp8 is not supported on {chip.device_kind}.*model.matmul = plain is'):
    fp8.check(chip)


def test_chips_with_them_are_taken():
  for chip in (Chip(platform='tpu', device_kind='TPU7x'), jax.devices()[0],
               Chip(platform='gpu', device_kind='NVIDIA L4', compute_capability='8.9'),
               Chip(platform='gpu', device_kind='NVIDIA H200', compute_capability='9.0')):
    fp8.check(chip)


def test_without_qwix_the_sentence_names_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'qwix', None)
  with pytest.raises(UserError, match=r"pip install 'lns_jax\[quant\]'"):
    fp8.check(jax.devices()[0])


def test_float16_is_refused_with_a_reason_and_another_name():
  with pytest.raises(UserError, match='float16 is not offered: without loss scaling.*no TPU.*bfloat16'):
    dataclasses.replace(model(), precision='float16')
