"""The decoder: every block matters, the past alone is seen, documents are apart, both loops agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax.errors import UserError
from lns_jax.layers import schemes
from lns_jax.models import decoder, layout, loss
from tiny import batch, leaves_close, model, params

SCHEMES = sorted(schemes.SCHEMES)
FORWARD = jax.jit(decoder.forward, static_argnums=0)


def forward(config, p, b):
  return FORWARD(config, p, b['tokens'], segment_ids=b['segment_ids'])


def mean_loss(config, p, b):
  w = loss.weights(b)
  return jnp.sum(loss.token_losses(decoder.forward(config, p, b['tokens'], segment_ids=b['segment_ids']),
                                   b['targets'], w)) / jnp.sum(w)


@pytest.mark.parametrize('scheme', SCHEMES)
def test_every_block_changes_the_logits(scheme):
  """Known fault N1: a name that matches no branch leaves identity blocks."""
  config = model(scheme=scheme, num_layers=3, mix_fraction=0.5)
  p, b = params(config), batch()
  whole = forward(config, p, b)
  for l in config.layer_ids:
    for sub, matrix in (('attn', 'o'), ('mlp', 'down')):
      changed = jax.tree.map(lambda x: x, p)
      # Not a multiple: a norm after the branch would hide it.
      changed['layers'][str(l)][sub][matrix] = jnp.roll(p['layers'][str(l)][sub][matrix], 1, axis=0)
      assert np.abs(forward(config, changed, b) - whole).max() > 1e-4, (l, sub)


@pytest.mark.parametrize('scheme', ['lns', 'mix'])
def test_scan_equals_unrolled(scheme):
  config = model(scheme=scheme, num_layers=4, mix_fraction=0.5)
  scanned = model(scheme=scheme, num_layers=4, mix_fraction=0.5, loop='scan')
  p, b = params(config), batch()
  value, grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(config, q, b)))(p)
  other, other_grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(scanned, q, b)))(layout.stack(p, scanned))
  assert float(other) == pytest.approx(float(value), rel=1e-6)
  leaves_close(layout.unstack(other_grads), grads, 2e-5)


@pytest.mark.parametrize('scheme', SCHEMES)
def test_scan_equals_unrolled_in_float64(scheme):
  with jax.enable_x64(True):
    settings = dict(scheme=scheme, num_layers=3, mix_fraction=0.5, d_model=16, d_ff=32, precision='float64')
    config, scanned = model(**settings), model(**settings, loop='scan')
    p, b = params(config), batch()
    value, grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(config, q, b)))(p)
    other, other_grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(scanned, q, b)))(layout.stack(p, scanned))
    assert value.dtype == jnp.float64 and float(other) == pytest.approx(float(value), rel=1e-12)
    leaves_close(layout.unstack(other_grads), grads, 1e-12)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_remat_changes_no_number(loop):
  config, b = model(loop=loop, scheme='lns'), batch()
  again = model(loop=loop, scheme='lns', remat='full')
  p = params(config)
  grads = [jax.jit(jax.grad(lambda q, c=c: mean_loss(c, q, b)))(p) for c in (config, again)]
  leaves_close(grads[1], grads[0], 1e-5)


@pytest.mark.parametrize('scheme', SCHEMES)
def test_forward_and_gradient_are_finite_at_depth_96(scheme):
  config = model(scheme=scheme, num_layers=96, d_model=16, d_ff=32, loop='scan', init_std=0.02, init='paper')
  p, b = params(config, random_gains=False), batch(2, 8)
  value, grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(config, q, b)))(p)
  assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_twins_have_the_same_start():
  a, b = (decoder.init(model(scheme=s), jax.random.key(3)) for s in ('pre', 'lns'))
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_both_loops_have_the_same_start():
  a, b = decoder.init(model(), jax.random.key(3)), decoder.init(model(loop='scan'), jax.random.key(3))
  jax.tree.map(np.testing.assert_array_equal, a, layout.unstack(b))


@pytest.mark.parametrize('scheme', ['pre', 'mix'])
def test_no_token_sees_the_future(scheme):
  """Gradient of the logits at position 5 with respect to the embeddings: nothing after 5, something at each before."""
  config = model(scheme=scheme)
  p, T = params(config), 9
  x_BTD = jax.random.normal(jax.random.key(0), (1, T, 64))
  from lns_jax.layers import attention
  ctx = attention.context(config, jnp.zeros((1, T), jnp.int32), None)
  def at_5(x):
    out, _ = decoder.layers(config, p, x, ctx, lambda out: {})
    return jnp.sum(jnp.square(decoder.head(config, p, out)[0, 5]))
  seen = np.abs(jax.grad(at_5)(x_BTD)[0]).max(-1)
  assert (seen[6:] == 0).all() and (seen[:6] > 0).all()


def test_a_document_never_sees_another():
  """Known fault T1."""
  config = model()
  p = params(config)
  ids = jnp.array([[1, 1, 1, 2, 2]])
  packed = FORWARD(config, p, jnp.array([[5, 6, 7, 8, 9]]), segment_ids=ids)
  moved = FORWARD(config, p, jnp.array([[1, 1, 1, 8, 9]]), segment_ids=ids)
  alone = FORWARD(config, p, jnp.array([[8, 9]]))
  np.testing.assert_array_equal(packed[:, 3:], moved[:, 3:])
  np.testing.assert_allclose(packed[:, 3:], alone, atol=1e-5)
  assert np.abs(packed[:, :3] - moved[:, :3]).max() > 1e-2


def test_gradient_of_a_packed_row_is_the_sum_of_its_documents():
  config = model()
  p = params(config)
  def total(q, tokens, targets, ids):
    b = {k: jnp.array([v]) for k, v in (('tokens', tokens), ('targets', targets), ('segment_ids', ids))}
    w = loss.weights(b)
    logits = decoder.forward(config, q, b['tokens'], segment_ids=b['segment_ids'])
    return jnp.sum(loss.token_losses(logits, b['targets'], w))
  grad = jax.jit(jax.grad(total))
  packed = grad(p, [5, 6, 7, 8, 9, 0], [6, 7, 1, 9, 1, 0], [1, 1, 1, 2, 2, 0])
  a, b = grad(p, [5, 6, 7], [6, 7, 1], [1, 1, 1]), grad(p, [8, 9], [9, 1], [1, 1])
  leaves_close(packed, jax.tree.map(jnp.add, a, b), 2e-5)


def test_a_tied_head_is_the_embedding():
  tied, untied = model(tie_embeddings=True), model()
  p = params(tied)
  assert 'head' not in p
  b = batch()
  np.testing.assert_array_equal(forward(tied, p, b), forward(untied, {**p, 'head': p['embed']}, b))


def test_states_are_the_stream_before_the_final_norm():
  """Known fault D4: scaling the embedding must show in the last state of a Pre-LN net, which a norm would hide."""
  config, b = model(num_layers=3), batch()
  p = params(config)
  states = decoder.states(config, p, b['tokens'], segment_ids=b['segment_ids'])
  assert states.shape == (4, 4, 16, 64)
  np.testing.assert_array_equal(states[0], p['embed']['table'][b['tokens']])
  np.testing.assert_allclose(decoder.head(config, p, states[-1]), forward(config, p, b), atol=1e-5)
  louder = {**p, 'embed': {'table': 100 * p['embed']['table']}}
  assert np.var(decoder.states(config, louder, b['tokens'])[-1]) > 10 * np.var(states[-1])


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_taps_return_what_they_name(loop):
  config, b = model(num_layers=3, loop=loop, scheme='lns'), batch()
  p = params(config)
  logits, out = lns_jax.apply(config, p, b, taps=['layers/2/*', 'embed', 'layers/3/out'])
  states = lns_jax.states(config, p, b['tokens'], segment_ids=b['segment_ids'])
  np.testing.assert_allclose(out['embed'], states[0], atol=1e-6)
  np.testing.assert_allclose(out['layers/3/out'], states[3], atol=1e-6)
  np.testing.assert_allclose(out['layers/2/attn_x'] + out['layers/2/attn_branch'], out['layers/2/mlp_x'], atol=1e-6)
  np.testing.assert_allclose(logits, forward(config, p, b), atol=1e-5)
  assert 'layers/1/out' not in out and len(out) == 11
  with pytest.raises(UserError, match="'layers/9/out'"):
    lns_jax.apply(config, p, b, taps=['layers/9/out'])


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
@pytest.mark.parametrize('scheme', ['lns', 'mix', 'deepnorm'])
def test_a_removed_layer_is_skipped_and_the_others_keep_their_index(loop, scheme):
  config, b = model(num_layers=4, loop=loop, scheme=scheme, mix_fraction=0.5), batch()
  p = params(config)
  less, q = lns_jax.remove_layers(config, p, [2])
  assert (less.layer_ids, less.num_layers, less.depth) == ((1, 3, 4), 3, 4)
  from lns_jax.layers import attention, block
  ctx = attention.context(config, b['tokens'], b['segment_ids'])
  x, canonical = decoder.embed(config, p, b['tokens']), layout.unstack(p)
  for l in (1, 3, 4):
    x, _ = block.Block(config).apply({'params': canonical['layers'][str(l)]}, x, ctx, l)
  np.testing.assert_allclose(forward(less, q, b), decoder.head(config, p, x), atol=1e-5)


def test_removal_refuses_what_is_not_there():
  config = model(num_layers=3)
  with pytest.raises(UserError, match='no layer 7; its layers are 1-3'):
    lns_jax.remove_layers(config, params(config), [7])
  with pytest.raises(UserError, match='keep at least one'):
    lns_jax.remove_layers(config, params(config), [1, 2, 3])


def test_the_two_types_of_each_precision():
  for precision, stored, logits in (('float32', 'float32', 'float32'), ('bfloat16', 'float32', 'float32'),
                                    ('paper_bf16', 'bfloat16', 'float32')):
    config = model(precision=precision)
    p = decoder.init(config, jax.random.key(0))
    assert {str(x.dtype) for x in jax.tree.leaves(p)} == {stored}
    assert str(forward(config, p, batch()).dtype) == logits
    assert str(decoder.states(config, p, batch()['tokens']).dtype) == {'float32': 'float32'}.get(precision, 'bfloat16')


def test_float64_without_x64_is_refused():
  with pytest.raises(UserError, match='JAX_ENABLE_X64'):
    decoder.init(model(precision='float64'), jax.random.key(0))
