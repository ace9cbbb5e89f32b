"""The encoder (BERT): parity with transformers, its heads and losses, and the same machinery as the decoder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax import depth, sharding
from lns_jax.config import MeshConfig, ModelConfig
from lns_jax.errors import UserError
from lns_jax.layers import mlp, norms
from lns_jax.models import encoder, layout, transformer
from hf_fixtures import fixture
from tiny import leaves_close, with_random_gains

BERT = dict(family='encoder', causal=False, scheme='post', norm='layernorm', norm_eps=1e-12, bias='all', mlp='gelu',
            precision='float32')
TINY = dict(BERT, vocab_size=40, max_positions=16, d_model=16, d_ff=32, num_layers=3, num_heads=2, init_std=0.2,
            tie_embeddings=True)
CLOSE = dict(rtol=0, atol=1e-5)  # known fault I11

INIT, FORWARD, STATES = (jax.jit(f, static_argnums=0) for f in (transformer.init, lns_jax.forward, lns_jax.states))


def model(**changes) -> ModelConfig:
  return ModelConfig(**TINY | ({'tie_embeddings': False} if changes.get('head', 'mlm') != 'mlm' else {}) | changes)


def params(config):
  """Initial parameters with gains, and the biases that start at 0, random."""
  rng = np.random.default_rng(1)
  tree = with_random_gains(layout.unstack(INIT(config, jax.random.key(0))))
  drawn = jax.tree.map(lambda x: x if np.any(x) else jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)
  return layout.native(drawn, config)


def batch(rows=8, T=12, seed=0, head='mlm'):
  """Rows with padding at their ends, two types of tokens; every third token masked, or an answer in the second text."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 40, (rows, T)).astype(np.int32)
  ids = (np.arange(T) < T - np.arange(rows)[:, None] % 4).astype(np.int32)
  found = {'tokens': tokens, 'segment_ids': ids, 'token_types': np.tile(np.arange(T) >= 5, (rows, 1)).astype(np.int32)}
  if head == 'mlm':
    masked = (np.arange(T) % 3 == 0) & (ids > 0)
    return found | {'targets': np.where(masked, rng.integers(0, 40, (rows, T)), -100).astype(np.int32)}
  return found | {'weights': (found['token_types'] * ids).astype(np.float32),
                  'labels': rng.integers(5, 8, (rows, 2)).astype(np.int32)}


def mean_loss(config, p, b):
  total, weight = encoder.summed_loss(config, p, transformer.before_head(config, p, b)[0], b)
  return total / weight


# --- against transformers


@functools.cache
def theirs(head='mlm', loop='unrolled', **changes):
  """(config, params, reference arrays) of transformers' BertForMaskedLM or BertForQuestionAnswering."""
  meta, arrays = fixture('bert')
  hf = meta['config']
  config = ModelConfig(**BERT | dict(
      vocab_size=hf['vocab_size'], max_positions=hf['max_position_embeddings'], type_vocab_size=hf['type_vocab_size'],
      d_model=hf['hidden_size'], d_ff=hf['intermediate_size'], num_layers=hf['num_hidden_layers'],
      num_heads=hf['num_attention_heads'], head=head, tie_embeddings=head == 'mlm', loop=loop) | changes)
  return config, layout.native(tree(config, lambda n: jnp.asarray(arrays[f'weight/{n}'])), config), arrays


def tree(config, get):
  """Our parameters from `get(name)`, which returns a Hugging Face weight or bias."""
  D, H, h = config.d_model, config.num_heads, config.head_dim
  norm = lambda at: {'gain': get(f'{at}.weight'), 'bias': get(f'{at}.bias')}
  def layer(at):
    names = {'q': 'self.query', 'k': 'self.key', 'v': 'self.value', 'o': 'output.dense'}
    attn = {n: get(f'{at}.attention.{names[n]}.weight').reshape(H, h, D).transpose(2, 0, 1) for n in 'qkv'}
    attn |= {f'{n}_bias': get(f'{at}.attention.{name}.bias') for n, name in names.items()}
    attn['o'] = get(f'{at}.attention.output.dense.weight').T.reshape(H, h, D)
    names = {'up': 'intermediate.dense', 'down': 'output.dense'}
    mlp = {n: get(f'{at}.{name}.weight').T for n, name in names.items()}
    mlp |= {f'{n}_bias': get(f'{at}.{name}.bias') for n, name in names.items()}
    return {'attn': attn, 'mlp': mlp, 'attn_out_norm': norm(f'{at}.attention.output.LayerNorm'),
            'mlp_out_norm': norm(f'{at}.output.LayerNorm')}
  at, head = 'bert.embeddings', 'cls.predictions'
  heads = {'none': lambda: {}, 'squad': lambda: {
      'head': {'span': get('qa_outputs.weight'), 'span_bias': get('qa_outputs.bias')}}, 'mlm': lambda: {
      'head': {'dense': get(f'{head}.transform.dense.weight').T, 'dense_bias': get(f'{head}.transform.dense.bias'),
               'norm': norm(f'{head}.transform.LayerNorm'), 'bias': get(f'{head}.bias')}}}
  tables = {'table': 'word', 'positions': 'position', 'types': 'token_type'}
  return {'embed': {n: get(f'{at}.{name}_embeddings.weight') for n, name in tables.items()},
          'embed_norm': norm(f'{at}.LayerNorm'),
          'layers': {str(l): layer(f'bert.encoder.layer.{l - 1}') for l in config.layer_ids}} | heads[config.head]()


def real(right):
  """Where the rows are not padding: a state of padding is nobody's."""
  return right['mask'] > 0


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_logits_and_all_states_are_those_of_transformers(loop):
  config, p, right = theirs(loop=loop)
  b = {'tokens': right['tokens'], 'segment_ids': right['mask'], 'token_types': right['token_types']}
  logits, out = jax.jit(lambda p: lns_jax.apply(config, p, b, ['embed', '*/out']))(p)
  states = np.stack([out['embed'], *(out[f'layers/{l}/out'] for l in (1, 2, 3))])
  assert logits.shape == (2, 12, 41) and states.shape == (4, 2, 12, 16) and right['logits'].std() > 1
  np.testing.assert_allclose(logits[real(right)], right['logits'][real(right)], **CLOSE)
  np.testing.assert_allclose(states[:, real(right)], right['states'][:, real(right)], **CLOSE)


def test_token_types_are_0_by_default():
  config, p, right = theirs()
  logits = FORWARD(config, p, right['tokens'], segment_ids=right['mask'])
  np.testing.assert_allclose(logits[real(right)], right['untyped_logits'][real(right)], **CLOSE)
  zeros = FORWARD(config, p, right['tokens'], segment_ids=right['mask'], token_types=np.zeros((2, 12), np.int32))
  np.testing.assert_array_equal(zeros, logits)
  assert np.abs(right['untyped_logits'] - right['logits']).max() > 0.1


def test_start_and_end_logits_are_those_of_transformers():
  config, p, right = theirs('squad')
  logits = FORWARD(config, p, right['tokens'], segment_ids=right['mask'], token_types=right['token_types'])
  assert logits.shape == (2, 12, 2)
  np.testing.assert_allclose(logits[real(right)], right['squad_logits'][real(right)], **CLOSE)


@pytest.mark.parametrize('head', ['mlm', 'squad', 'none'])
def test_parameters_are_those_of_transformers(head):
  config, p, right = theirs(head)
  shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
  assert jax.tree.map(jnp.shape, p) == jax.tree.map(jnp.shape, shapes)
  ours = {'mlm': ('bert', 'cls'), 'squad': ('bert', 'qa_outputs'), 'none': ('bert',)}[head]
  assert len(jax.tree.leaves(p)) == sum(n.startswith(tuple(f'weight/{o}' for o in ours)) for n in right)
  assert 'final_norm' not in p


@pytest.mark.parametrize('changes', [
    {'norm_eps': 1e-3}, {'scheme': 'pre'}, {'mlp': 'gelu_tanh'}])
def test_each_setting_is_what_makes_it_so(changes):
  """The parity test can fail: another eps, another scheme or another MLP is not transformers'."""
  config, p, right = theirs()
  other = dataclasses.replace(config, **changes)
  filled = transformer.init(other, jax.random.key(0))
  def merged(fresh, given):
    return {k: merged(v, given.get(k, {})) if isinstance(v, dict) else given.get(k, v) for k, v in fresh.items()}
  logits = FORWARD(other, merged(filled, p), right['tokens'], segment_ids=right['mask'],
                   token_types=right['token_types'])
  assert np.abs(logits - right['logits'])[real(right)].max() > 1e-4


# --- known fault I11


@pytest.mark.parametrize('eps, right', [(1e-12, 0.9999995), (1e-6, 0.7071068), (1e-5, 0.3015113)])
def test_layer_norm_by_hand(eps, right):
  config = model(norm_eps=eps)
  found = norms.Norm(config).apply({'params': {'gain': np.ones(2), 'bias': np.zeros(2)}}, np.float32([1e-3, -1e-3]))
  np.testing.assert_allclose(found, [right, -right], atol=1e-6)


@pytest.mark.parametrize('x, right', [(1.0, 0.8413447), (3.0, 2.9959503)])
def test_gelu_is_the_exact_one_in_the_mlp_and_in_the_head(x, right):
  config = model(d_model=1, d_ff=1, num_heads=1, bias='none')
  one = np.ones((1, 1), np.float32)
  found = mlp.MLP(config).apply({'params': {'up': one, 'down': one}}, np.full((1, 1, 1), x, np.float32), 1)
  assert found == pytest.approx(right, abs=2e-7)
  config = model(d_model=2, num_heads=1, norm='rmsnorm', norm_eps=1e-12)
  head = {'dense': np.eye(2, dtype=np.float32), 'dense_bias': np.zeros(2), 'bias': np.zeros(40),
          'norm': {'gain': np.ones(2)}}
  table = {'embed': {'table': np.eye(40, 2, dtype=np.float32)}, 'head': head}
  first, second = encoder.logits(config, table, np.float32([[[x, 2 * x]]]))[0, 0, :2]
  twice = {1.0: 1.9544997, 3.0: 5.9999999}[x]  # 2x Phi(2x), by tables of the normal distribution
  assert float(first / second) == pytest.approx(right / twice, rel=1e-6)


@pytest.mark.parametrize('segments', [False, True])
def test_the_first_token_sees_the_last(segments):
  config = model()
  p, b = params(config), batch(1)
  ids = b['segment_ids'] if segments else None
  other = b['tokens'].copy()
  other[:, -1] = (other[:, -1] + 1) % 40
  before, after = (STATES(config, p, tokens, segment_ids=ids) for tokens in (b['tokens'], other))
  np.testing.assert_array_equal(before[0, :, :-1], after[0, :, :-1])
  assert np.abs(before[1, :, 0] - after[1, :, 0]).max() > 1e-3


# --- embedding


def test_embedding_is_the_norm_of_three_embeddings_and_positions_restart():
  config = model()
  p, tokens, types = params(config), np.int32([[3, 9, 3, 7]]), np.int32([[0, 1, 1, 0]])
  e, n = p['embed'], p['embed_norm']
  found = STATES(config, p, tokens, segment_ids=np.int32([[1, 1, 2, 2]]), token_types=types)[0, 0]
  x = np.asarray(e['table'])[tokens[0]] + np.asarray(e['positions'])[[0, 1, 0, 1]] + np.asarray(e['types'])[types[0]]
  x = x.astype(np.float64)
  normed = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) * n['gain'] + n['bias']
  np.testing.assert_allclose(found, normed, atol=1e-5)


def test_documents_of_a_row_do_not_see_each_other():
  config = model()
  p, b = params(config), batch(2)
  packed = np.concatenate([b['tokens'][:, :8], b['tokens'][:, :5]], axis=1)
  ids = np.repeat([[1, 2]], 2, axis=0).repeat([8, 5], axis=1)
  found = FORWARD(config, p, packed, segment_ids=ids)
  np.testing.assert_allclose(found[:, :8], FORWARD(config, p, b['tokens'][:, :8]), atol=1e-5)
  np.testing.assert_allclose(found[:, 8:], FORWARD(config, p, b['tokens'][:, :5]), atol=1e-5)


def test_a_row_longer_than_the_table_of_positions_is_refused():
  config = model()
  with pytest.raises(UserError, match='17 tokens .* model.max_positions = 16'):
    FORWARD(config, params(config), np.zeros((1, 17), np.int32))


def test_a_type_that_the_model_does_not_have_is_loud():
  config = model()
  p, b = params(config), batch()
  with pytest.raises(UserError, match='output of the embedding is not finite at token 5 of sequence 0'):
    depth.variance(config, p, [b | {'token_types': b['token_types'] * 2}])


def test_token_types_of_a_decoder_are_refused():
  config = ModelConfig(vocab_size=40, d_model=16, d_ff=16, num_layers=1, num_heads=2)
  p = INIT(config, jax.random.key(0))
  for call in (lambda: lns_jax.apply(config, p, batch()), lambda: lns_jax.states(
      config, p, batch()['tokens'], token_types=batch()['token_types'])):
    with pytest.raises(UserError, match='token_types belong to model.family = encoder'):
      call()


# --- final norm


@pytest.mark.parametrize('scheme, has', [
    ('post', False), ('deepnorm', False), ('admin', False), ('pre', True), ('lns', True), ('sandwich', True),
    ('mix', True), ('res_norm', True), ('keel', False)])
def test_the_final_norm_is_there_unless_the_last_block_ends_with_one(scheme, has):
  config = model(scheme=scheme)
  p = transformer.unprofiled(config, jax.random.key(0))
  assert ('final_norm' in p) == config.has_final_norm == has
  assert 'embed_norm' in p
  last = np.asarray(jax.random.normal(jax.random.key(1), (1, 4, 16))) * 3
  moved = np.abs(transformer.final_norm(config, p, last) - last).max()
  assert moved > 0.1 if has else moved == 0


def test_removal_keeps_the_final_norm_of_the_whole_model():
  config = model(scheme='mix', mix_count=2)
  p = params(config)
  rest, q = lns_jax.remove_layers(config, p, [3])  # the only Pre-LN layer
  assert rest.has_final_norm and 'final_norm' in q
  assert np.isfinite(FORWARD(rest, q, batch()['tokens'])).all()


def test_a_decoder_of_scheme_post_keeps_its_final_norm():
  config = ModelConfig(scheme='post', num_layers=2)
  assert config.has_final_norm and not config.has_embed_norm


# --- losses


@pytest.mark.parametrize('tied', [True, False])
def test_masked_loss_is_the_cross_entropy_of_the_masked_tokens_alone(tied):
  config = model(tie_embeddings=tied)
  p, b = params(config), batch()
  logits = np.asarray(FORWARD(config, p, b['tokens'], segment_ids=b['segment_ids'], token_types=b['token_types']),
                      np.float64)
  at = b['targets'] >= 0
  logs = logits[at] - np.log(np.exp(logits[at]).sum(-1, keepdims=True))
  right = -logs[np.arange(at.sum()), b['targets'][at]].mean()
  assert float(jax.jit(mean_loss, static_argnums=0)(config, p, b)) == pytest.approx(right, rel=1e-5)
  weighed = b | {'targets': np.where(at, b['targets'], 7), 'weights': at.astype(np.float32)}
  assert float(jax.jit(mean_loss, static_argnums=0)(config, p, weighed)) == pytest.approx(right, rel=1e-5)
  assert ('table' in p['head']) != tied


def test_span_loss_is_the_mean_of_two_cross_entropies_over_what_may_answer():
  config = model(head='squad')
  p, b = params(config), batch(head='squad')
  b['weights'][3] = 0  # a row of which nothing may answer counts nothing
  logits = np.asarray(FORWARD(config, p, b['tokens'], segment_ids=b['segment_ids'], token_types=b['token_types']),
                      np.float64)
  losses = []
  for r in [0, 1, 2, 4, 5, 6, 7]:
    may = b['weights'][r] > 0
    for k in (0, 1):
      z = logits[r, :, k]
      losses.append(np.log(np.exp(z[may]).sum()) - z[b['labels'][r, k]])
  value, gradient = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)(config, p, b)
  assert float(value) == pytest.approx(np.mean(losses), rel=1e-5)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize('answer', [[0, 6], [6, 12], [-1, 6]])
def test_an_answer_where_none_may_be_is_not_a_number(answer):
  config = model(head='squad')
  p, b = params(config), batch(head='squad')
  b['labels'][2] = answer
  losses, weights = encoder.row_losses(config, p, transformer.before_head(config, p, b)[0], b)
  assert list(np.isnan(losses)) == [r == 2 for r in range(8)] and weights.sum() == 8


def test_scores_count_what_is_right():
  config, b = model(), batch()
  p = params(config)
  x = transformer.before_head(config, p, b)[0]
  best = np.asarray(encoder.logits(config, p, x)).argmax(-1)
  some = (np.arange(12) == 3)[None] & (b['segment_ids'] > 0)
  found = encoder.scores(config, p, x, b | {'targets': np.where(some, best, best + 1), 'weights': np.float32(some)})
  assert float(found['correct']) == some.sum()


# --- what the other families promise, an encoder does


@pytest.mark.parametrize('head', ['mlm', 'squad'])
def test_every_parameter_has_a_gradient(head):
  config = model(head=head, scheme='pre')
  p, b = params(config), batch(head=head)
  gradient = jax.jit(jax.grad(mean_loss, argnums=1), static_argnums=0)(config, p, b)
  flat = jax.tree_util.tree_leaves_with_path(gradient)
  still = [jax.tree_util.keystr(path, simple=True, separator='/') for path, g in flat if np.abs(g).max() < 1e-7]
  # A softmax does not feel a bias of its keys, nor one over positions a bias of all of them.
  assert [n for n in still if not n.endswith('k_bias')] == (
      ['final_norm/bias', 'head/span_bias'] if head == 'squad' else [])


@pytest.mark.parametrize('scheme', ['post', pytest.param('mix', marks=pytest.mark.slow)])
def test_scan_and_remat_equal_unrolled(scheme):
  config, scanned, remat = (model(scheme=scheme, mix_fraction=0.4, **more) for more in (
      {}, {'loop': 'scan'}, {'remat': 'full'}))
  p, b = params(config), batch()
  value, gradient = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)(config, p, b)
  for other, q in ((scanned, layout.stack(p, scanned)), (remat, p)):
    found, other_gradient = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)(other, q, b)
    assert float(found) == pytest.approx(float(value), rel=1e-6)
    trees = [layout.unstack(other_gradient), jax.tree.map(lambda x: x, gradient)]
    for tree in trees:
      for layer in tree['layers'].values():
        layer['attn'].pop('k_bias')
    leaves_close(*trees, 5e-4)


@pytest.mark.slow
def test_eight_devices_see_what_one_does():
  config = model(d_model=32, num_heads=4)
  p, b = params(config), batch()
  mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  alone = FORWARD(config, p, b['tokens'], segment_ids=b['segment_ids'])
  with sharding.use(mesh):
    spread = jax.jit(lambda q, tokens, ids: lns_jax.forward(config, q, tokens, segment_ids=ids), in_shardings=(
        sharding.params(mesh, config), sharding.batch(mesh), sharding.batch(mesh)))(p, b['tokens'], b['segment_ids'])
  np.testing.assert_allclose(spread, alone, atol=2e-6 * np.abs(alone).max())


def test_every_block_changes_the_logits():
  config = model()
  p, b = params(config), batch()
  for l in '123':
    for sub, matrix in (('attn', 'o'), ('mlp', 'down')):
      changed = jax.tree.map(lambda x: x, p)
      changed['layers'][l][sub][matrix] = jnp.roll(p['layers'][l][sub][matrix], 1, axis=0)
      assert np.abs(FORWARD(config, changed, b['tokens']) - FORWARD(config, p, b['tokens'])).max() > 1e-4, (l, sub)


def test_admin_reads_a_batch_of_an_encoder():
  config = model(scheme='admin')
  p = transformer.init(config, jax.random.key(0), batch())
  assert len({float(p['layers'][l]['mlp_a'][0]) for l in '123'}) == 3


# --- measures of depth


def test_variance_is_numpys_over_real_tokens():
  config = model(scheme='lns')
  p, b = params(config), batch()
  s = STATES(config, p, b['tokens'], segment_ids=b['segment_ids'], token_types=b['token_types'])
  right = np.asarray(s, np.float64)[:, b['segment_ids'] > 0].var(-1).mean(1)
  found = depth.variance(config, p, [b])
  np.testing.assert_allclose(found.value, right, rtol=1e-5)
  assert found.tokens == b['segment_ids'].sum()


@pytest.mark.parametrize('head', ['mlm', 'squad'])
def test_removal_is_the_rise_of_the_loss(head):
  config = model(head=head)
  p, b = params(config), batch(head=head)
  found = depth.layer_drop(config, p, [b])
  loss = lambda c, q: float(mean_loss(c, q, b))
  assert found['baseline'].value == pytest.approx(loss(config, p), rel=1e-5)
  rises = [loss(*lns_jax.remove_layers(config, p, [l])) - loss(config, p) for l in (1, 2, 3)]
  np.testing.assert_allclose(found['layer_drop'].value, rises, rtol=1e-3, atol=1e-5)


MEASURES = {
    'profile': lambda *a: depth.profile(*a)['angular'], 'cka': lambda *a: depth.cka(*a)['cka'],
    'gradients': lambda *a: depth.gradients(*a)['grad_norm'], 'lens': lambda *a: depth.logit_lens(*a)['lens_kl'],
    'jacobian': lambda *a: depth.jacobian(*a)['spectral'], 'heat': lambda *a: depth.mean_jacobian(*a)['dominance'],
    'perturb': lambda *a: depth.perturb(*a)['noise'],
    'linear': lambda *a: depth.replaceability(*a)['linear_rise']}


@pytest.mark.slow
@pytest.mark.parametrize('name', MEASURES)
def test_measures_take_an_encoder(name):
  config = model(num_layers=2)
  found = MEASURES[name](config, params(config), [batch(rows=4, T=12 if name == 'linear' else 6)])
  value = found.value if name != 'profile' else found.value[0]
  assert np.isfinite(value).all() and np.abs(value).max() > 0


@pytest.mark.parametrize('name', ['gradients', 'lens', 'perturb'])
def test_a_model_without_a_head_has_states_and_no_loss(name):
  config = model(head='none', num_layers=2)
  p, b = params(config), batch()
  assert 'head' not in p and STATES(config, p, b['tokens']).shape == (3, 8, 12, 16)
  with pytest.raises(UserError, match='^a model with model.head = none has neither logits nor a loss; [^.]*states'):
    MEASURES[name](config, p, [b])
  with pytest.raises(UserError, match='model.head = none'):
    lns_jax.forward(config, p, b['tokens'])


def test_the_lens_refuses_answers():
  config = model(head='squad')
  with pytest.raises(UserError, match='model.head = squad'):
    depth.logit_lens(config, params(config), [batch(head='squad')])
