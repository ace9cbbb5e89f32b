"""The compiled program: the factors are literals, and LNS costs nothing per token."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax.models import loss, transformer
from programs import constants
from tiny import batch, model, params

L = 7
# 1/sqrt(l) for l = 1 vanishes and for l = 4 is the common literal 0.5: neither tells pre and lns apart.
TELLING = {np.float32(l ** -0.5) for l in (2, 3, 5, 6, 7)}


def compiled(config, rows=2, T=8, gradient=False):
  p, b = params(config), batch(rows, T, config.vocab_size)
  def f(q, b):
    w = loss.weights(b)
    logits = transformer.forward(config, q, b['tokens'], segment_ids=b['segment_ids'])
    return jnp.sum(loss.token_losses(logits, b['targets'], w))
  return jax.jit(jax.grad(f) if gradient else f).lower(p, b)


def literals(text: str) -> set:
  """Scalar float32 constants of an HLO text."""
  return {np.float32(v) for v in re.findall(r'f32\[\] constant\(([-+.0-9e]+)\)', text)}


@pytest.mark.parametrize('gradient', [False, True])
@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
def test_the_factors_are_literals(gradient, precision):
  settings = dict(num_layers=L, d_model=16, d_ff=32, precision=precision)
  of_lns, of_pre = (literals(compiled(model(scheme=s, **settings), gradient=gradient).compile().as_text())
                    for s in ('lns', 'pre'))
  assert TELLING <= of_lns and np.float32(0.5) in of_lns
  assert not TELLING & of_pre


def test_the_literals_follow_the_index_and_not_the_position():
  config = model(scheme='lns', num_layers=2, layer_ids=(5, 7), d_model=16, d_ff=32)
  found = literals(compiled(config).compile().as_text())
  assert TELLING & found == {np.float32(5 ** -0.5), np.float32(7 ** -0.5)}


# What a compiled program of 7 layers must contain, by hand; pre has none of it.
IN_PROGRAM = {
    'branch_lns': [l ** -0.5 for l in (2, 3, 5, 6, 7)],
    'lns_before': [l ** -0.5 for l in (2, 3, 5, 6, 7)],
    'lns_after_sum': [l ** -0.5 for l in (2, 3, 5, 6, 7)],
    'lns_learned': [l ** -0.5 for l in (2, 3, 5, 6, 7)],
    'lns_stabilised': [1.001 ** -0.5, 2.001 ** -0.5, 5.001 ** -0.5, 6.001 ** -0.5],
    'deepnorm': [14 ** 0.25],
    'keel': [7.0],
    'completep': [2 / 7],
    'prores': [1 / 3000, 1 / 7000],
}


@pytest.mark.parametrize('scheme', IN_PROGRAM)
def test_every_fixed_factor_is_read_off_the_compiled_program(scheme):
  settings = dict(num_layers=L, d_model=16, d_ff=32, norm_eps=1e-5)
  found = literals(stepped(model(scheme=scheme, **settings)).compile().as_text())
  wanted = {np.float32(v) for v in IN_PROGRAM[scheme]}
  assert wanted <= found, wanted - found
  assert not wanted & literals(stepped(model(**settings)).compile().as_text())


def stepped(config):
  """The forward pass with a traced step, as in training."""
  p, b = params(config), batch(2, 8, config.vocab_size)
  f = lambda q, b, step: transformer.head(config, q, transformer.stream(config, q, b['tokens'], step=step)[0])
  return jax.jit(f).lower(p, b, np.int32(5))


def test_the_gains_of_lns_init_are_no_part_of_the_program():
  config = model(scheme='lns_init', num_layers=L, d_model=16, d_ff=32)
  assert not TELLING & literals(compiled(config).compile().as_text())


@pytest.mark.parametrize('n', [7, 192])
def test_the_scanned_factors_are_one_constant_vector(n):
  settings = dict(num_layers=n, d_model=8, d_ff=8, num_heads=2, loop='scan')
  vectors = constants(compiled(model(scheme='lns', **settings)).as_text(), n)
  expected = np.arange(1, n + 1, dtype=np.float64) ** -0.5
  assert any(np.array_equal(v, expected.astype(np.float32)) for v in vectors)
  assert not constants(compiled(model(scheme='pre', **settings)).as_text(), n)


@pytest.mark.parametrize('norm', ['rmsnorm', 'layernorm', 'dyt'])
def test_the_body_of_the_scanned_loop_is_that_of_pre(norm):
  """Operation by operation, as traced: the factors are on the gains before it."""
  def body(scheme):
    config = model(scheme=scheme, norm=norm, num_layers=L, loop='scan')
    program = jax.make_jaxpr(lambda p, t: transformer.forward(config, p, t))(params(config), batch(2, 8)['tokens'])
    return str(next(e for e in program.eqns if e.primitive.name == 'scan').params['jaxpr'])
  assert body('lns') == body('pre') != body('branch_lns')


def test_the_parameter_trees_are_the_same():
  a, b = (jax.tree.map(lambda x: (x.shape, x.dtype), params(model(scheme=s))) for s in ('pre', 'lns'))
  assert a == b and sum('gain' in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(a)) >= 5


def flops(scheme, rows, T, gradient):
  settings = dict(num_layers=L, d_model=16, d_ff=32)
  return compiled(model(scheme=scheme, **settings), rows, T, gradient).compile().cost_analysis()['flops']


@pytest.mark.parametrize('gradient', [False, True])
def test_lns_costs_no_flop_per_token(gradient):
  extra = [flops('lns', *shape, gradient) - flops('pre', *shape, gradient) for shape in ((2, 8), (4, 32))]
  norms, D = 2 * (L - 1), 16
  assert extra[0] == extra[1] and 0 < extra[0] <= 8 * D * norms


def test_the_products_are_the_same():
  def products(scheme):
    text = compiled(model(scheme=scheme, num_layers=3), gradient=True).as_text()
    return sorted(re.findall(r'stablehlo\.dot_general.*?: (\(.*?\) -> \S+)', text))
  assert products('pre') == products('lns') and len(products('pre')) > 3 * 3 * 7
