"""The decoder: every block matters, the past alone is seen, documents are apart, both loops agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax.errors import UserError
from lns_jax.layers import schemes
from lns_jax.models import layout, loss, transformer
from tiny import batch, leaves_close, model, params

SCHEMES = sorted(schemes.SCHEMES)
# One of each kind of row in the fast tier; the others in the slow one.
KINDS = ('pre', 'lns', 'lns_learned', 'mix', 'deepnorm', 'peri', 'gpas', 'prores', 'completep')
BY_TIER = [s if s in KINDS else pytest.param(s, marks=pytest.mark.slow) for s in SCHEMES]
FORWARD = jax.jit(transformer.forward, static_argnums=0)


def forward(config, p, b):
  return FORWARD(config, p, b['tokens'], segment_ids=b['segment_ids'])


def mean_loss(config, p, b):
  w = loss.weights(b)
  return jnp.sum(loss.token_losses(transformer.forward(config, p, b['tokens'], segment_ids=b['segment_ids']),
                                   b['targets'], w)) / jnp.sum(w)


@pytest.mark.parametrize('scheme', SCHEMES)
def test_every_block_changes_the_logits(scheme):
  """Known fault N1: a name that matches no branch leaves identity blocks. Learned factors are random (tiny.params)."""
  config = model(scheme=scheme, num_layers=4, mix_fraction=0.5)
  p, b = params(config), batch()
  whole = forward(config, p, b)
  for l in config.layer_ids:
    for sub, matrix in (('attn', 'o'), ('mlp', 'down')):
      changed = jax.tree.map(lambda x: x, p)
      # Not a multiple: a norm after the branch would hide it.
      changed['layers'][str(l)][sub][matrix] = jnp.roll(p['layers'][str(l)][sub][matrix], 1, axis=0)
      assert np.abs(forward(config, changed, b) - whole).max() > 1e-4, (l, sub)


# Where a block whose branches are 0 is the identity by the equation: no norm and no factor on the stream itself.
IDENTITY = {'pre', 'lns', 'lns_init', 'lns_learned', 'lns_stabilised', 'branch_lns', 'lns_before', 'res_norm',
            'res_norm_lns', 'sandwich', 'peri', 'layerscale', 'skipinit', 'rezero', 'group_ln', 'prores', 'completep'}


@pytest.mark.parametrize('scheme', SCHEMES)
def test_a_block_with_zero_branches_is_the_identity_where_the_equation_says_so(scheme):
  config = model(scheme=scheme, num_layers=4)  # mix: layer 1 is Post-LN; keel: layer 1 is Pre-LN
  p, b = params(config), batch()
  for layer in p['layers'].values():
    layer['attn']['o'], layer['mlp']['down'] = (jnp.zeros_like(x) for x in (layer['attn']['o'], layer['mlp']['down']))
  states = np.asarray(transformer.states(config, p, b['tokens']), np.float64)
  same = [np.array_equal(states[l], states[l - 1]) for l in config.layer_ids]
  assert same == {'mix': [False, True, True, True], 'keel': [True, False, False, False],
                  'lns_after_sum': [True, False, False, False]}.get(scheme, [scheme in IDENTITY] * 4)
  if scheme == 'lns_after_sum':  # both sums of layer l are multiplied by l^-1/2
    np.testing.assert_allclose(states[3], states[2] / 3, rtol=1e-6)
  if scheme == 'gpas':
    gate = float(p['layers']['2']['stream_gate'])
    np.testing.assert_allclose(states[2], states[1] * (1 - gate / (1 + np.exp(-gate))) ** 2, rtol=1e-5, atol=1e-7)


def test_lns_before_is_pre_as_eps_goes_to_zero():
  """RMSNorm(c x) = RMSNorm(x) but for eps: Table 8's 26.97 against 26.73 is an estimate of the paper's noise."""
  b = batch()
  def apart(eps):
    config = model(scheme='lns_before', num_layers=4, norm_eps=eps, init_std=0.02)
    p = params(config)
    return np.abs(forward(config, p, b) - forward(model(num_layers=4, norm_eps=eps, init_std=0.02), p, b)).max()
  assert apart(1e-3) > 1e-2 and apart(1e-12) < 1e-5


def test_prores_starts_as_the_embedding_alone_and_ends_as_pre():
  p, b = params(model(num_layers=4)), batch()
  at = lambda step: model(scheme='prores', num_layers=4, prores_steps=10, ramp_step=step)
  states = transformer.states(at(0), p, b['tokens'])
  np.testing.assert_array_equal(states[4], states[0])
  for finished in (at(40), at(-1)):
    np.testing.assert_allclose(forward(finished, p, b), forward(model(num_layers=4), p, b), atol=1e-5)
  halfway = transformer.states(at(15), p, b['tokens'])  # layer 1 is whole, layer 3 at a half
  np.testing.assert_allclose(halfway[1], transformer.states(at(-1), p, b['tokens'])[1], atol=1e-6)
  _, kept = transformer.stream(at(-1), p, b['tokens'], None, lambda out: {k: v for k, v in out.items() if 'mlp' in k},
                           step=jnp.int32(15))
  third = kept['layers']['3']
  np.testing.assert_allclose(third['mlp_branch'], third['mlp_out'] / 2, rtol=1e-6)


def test_admin_starts_from_the_variance_of_what_lies_below():
  """a^2 = Var[a x] + Var[f(x)] of the sub-layer below, from 1; its own a is in force (arXiv 2004.08249)."""
  config, b = model(scheme='admin', num_layers=3), batch()
  p = transformer.init(config, jax.random.key(0), b)
  _, out = lns_jax.apply(config, p, b, taps=['embed', 'layers/*/*'])
  real, square, expected = b['segment_ids'] > 0, 1.0, []
  for l in (1, 2, 3):
    for sub in ('attn', 'mlp'):
      expected.append(np.sqrt(square))
      x, f = (np.asarray(out[f'layers/{l}/{sub}_{kind}'], np.float64)[real] for kind in ('x', 'out'))
      square = square * np.var(x) + np.var(f)
  found = [p['layers'][str(l)][f'{sub}_a'] for l in (1, 2, 3) for sub in ('attn', 'mlp')]
  assert {x.shape for x in found} == {(64,)} and all((x == x[0]).all() for x in found)
  np.testing.assert_allclose([x[0] for x in found], expected, rtol=1e-4)
  assert expected[1] ** 2 > 1e-3 + np.var(np.asarray(out['embed'], np.float64)[real]) / 2  # the embedding counts
  scanned = transformer.init(model(scheme='admin', num_layers=3, loop='scan'), jax.random.key(0), b)
  leaves_close(layout.unstack(scanned), p, 1e-5)


def test_peri_norms_the_embedding():
  config, b = model(scheme='peri'), batch()
  p = params(config)
  x = np.asarray(p['embed']['table'], np.float64)[b['tokens']]
  gain = np.asarray(p['embed_norm']['gain'], np.float64)
  expected = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * gain
  np.testing.assert_allclose(lns_jax.states(config, p, b['tokens'])[0], expected, atol=2e-5)


def test_completep_divides_the_head_by_the_width_ratio():
  b = batch()
  wide, base = model(scheme='completep', num_layers=2, base_width=16), model(num_layers=2)
  p = params(base)  # at L = L0 the branches are whole: only the head's 1 / 4 differs
  np.testing.assert_allclose(forward(wide, p, b), forward(base, p, b) / 4, rtol=1e-5, atol=1e-6)


def test_admin_without_a_batch_is_refused():
  with pytest.raises(UserError, match="'admin' starts from the variance .* on a batch"):
    transformer.init(model(scheme='admin'), jax.random.key(0))


@pytest.mark.parametrize('scheme', ['layerscale', 'rezero', 'skipinit', 'lns_learned', 'gpas', 'admin'])
def test_learned_factors_receive_a_gradient(scheme):
  config, b = model(scheme=scheme, num_layers=3), batch()
  grads = jax.jit(jax.grad(lambda q: mean_loss(config, q, b)))(params(config))
  for l in '123':
    found = [np.abs(g).max() for name, g in grads['layers'][l].items() if name in schemes.LEARNED]
    assert found and min(found) > 0


@pytest.mark.parametrize('norm', ['rmsnorm', 'layernorm', 'nonparametric_layernorm', 'dyt'])
@pytest.mark.parametrize('scheme', ['lns', *(pytest.param(s, marks=pytest.mark.slow) for s in ('peri', 'deepnorm'))])
def test_every_norm_trains_in_both_loops(norm, scheme):
  settings = dict(norm=norm, scheme=scheme, num_layers=3)
  config, scanned, b = model(**settings), model(**settings, loop='scan'), batch()
  p = params(config)
  value, grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(config, q, b)))(p)
  other, _ = jax.jit(jax.value_and_grad(lambda q: mean_loss(scanned, q, b)))(layout.stack(p, scanned))
  assert float(other) == pytest.approx(float(value), rel=1e-6)
  assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
  assert ('final_norm' in p) == (norm != 'nonparametric_layernorm')


@pytest.mark.parametrize('scheme', ['lns', 'mix'])
def test_scan_equals_unrolled(scheme):
  config = model(scheme=scheme, num_layers=4, mix_fraction=0.5)
  scanned = model(scheme=scheme, num_layers=4, mix_fraction=0.5, loop='scan')
  p, b = params(config), batch()
  value, grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(config, q, b)))(p)
  other, other_grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(scanned, q, b)))(layout.stack(p, scanned))
  assert float(other) == pytest.approx(float(value), rel=1e-6)
  leaves_close(layout.unstack(other_grads), grads, 2e-5)


@pytest.mark.parametrize('scheme', BY_TIER)
def test_scan_equals_unrolled_in_float64(scheme):
  with jax.enable_x64(True):
    settings = dict(scheme=scheme, num_layers=3, mix_fraction=0.5, d_model=16, d_ff=32, precision='float64',
                    prores_steps=10, ramp_step=15)
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


@pytest.mark.parametrize('scheme', BY_TIER)
def test_forward_and_gradient_are_finite_at_depth_96(scheme):
  config = model(scheme=scheme, num_layers=96, d_model=16, d_ff=32, loop='scan', init_std=0.02, init='paper')
  p, b = params(config, random_gains=False), batch(2, 8)
  value, grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(config, q, b)))(p)
  assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize('scheme', SCHEMES)
def test_twins_have_the_same_start(scheme):
  """Matrices that both have: so that a comparison differs in the scheme alone. DeepNorm's start is its own."""
  a, b = (params(model(scheme=s), 3, random_gains=False) for s in ('pre', scheme))
  of = lambda p: p['layers']['2']
  np.testing.assert_array_equal(a['embed']['table'], b['embed']['table'])
  np.testing.assert_array_equal(a['head']['table'], b['head']['table'])
  for sub, name in (('attn', 'q'), ('attn', 'o'), ('mlp', 'down')):
    scale = np.std(of(b)[sub][name]) / np.std(of(a)[sub][name])
    np.testing.assert_allclose(of(b)[sub][name], scale * of(a)[sub][name], rtol=1e-4)
    assert scale == 1 or scheme == 'deepnorm'


def test_both_loops_have_the_same_start():
  a, b = transformer.init(model(), jax.random.key(3)), transformer.init(model(loop='scan'), jax.random.key(3))
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
    out, _ = transformer.layers(config, p, x, ctx, lambda out: {})
    return jnp.sum(jnp.square(transformer.head(config, p, out)[0, 5]))
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
    logits = transformer.forward(config, q, b['tokens'], segment_ids=b['segment_ids'])
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
  states = transformer.states(config, p, b['tokens'], segment_ids=b['segment_ids'])
  assert states.shape == (4, 4, 16, 64)
  np.testing.assert_array_equal(states[0], p['embed']['table'][b['tokens']])
  np.testing.assert_allclose(transformer.head(config, p, states[-1]), forward(config, p, b), atol=1e-5)
  louder = {**p, 'embed': {'table': 100 * p['embed']['table']}}
  assert np.var(transformer.states(config, louder, b['tokens'])[-1]) > 10 * np.var(states[-1])


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
  x, canonical = transformer.enter(config, p, b['tokens'])[0], layout.unstack(p)
  for l in (1, 3, 4):
    x, _ = block.Block(config).apply({'params': canonical['layers'][str(l)]}, x, ctx, l)
  np.testing.assert_allclose(forward(less, q, b), transformer.head(config, p, x), atol=1e-5)


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
    p = transformer.init(config, jax.random.key(0))
    assert {str(x.dtype) for x in jax.tree.leaves(p)} == {stored}
    assert str(forward(config, p, batch()).dtype) == logits
    states = transformer.states(config, p, batch()['tokens'])
    assert str(states.dtype) == {'float32': 'float32'}.get(precision, 'bfloat16')


def test_float64_without_x64_is_refused():
  with pytest.raises(UserError, match='JAX_ENABLE_X64'):
    transformer.init(model(precision='float64'), jax.random.key(0))
