"""The vision transformer: tokens, states, factors, parity with transformers, and the same machinery as the decoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax import depth, sharding
from lns_jax.config import MeshConfig, ModelConfig
from lns_jax.errors import UserError
from lns_jax.layers import norms
from lns_jax.models import layout, transformer, vit
from hf_fixtures import CLOSE, fixture
from tiny import leaves_close, with_random_gains

VIT = dict(family='vit', causal=False, norm='layernorm', bias='all', mlp='gelu', precision='float32')
TINY = dict(VIT, image_size=4, patch_size=2, channels=1, num_classes=5, d_model=16, d_ff=32, num_layers=3, num_heads=2,
            init_std=0.2)


INIT, FORWARD, STATES = (jax.jit(f, static_argnums=0) for f in (transformer.init, lns_jax.forward, lns_jax.states))


def model(**changes) -> ModelConfig:
  return ModelConfig(**TINY | changes)


def params(config):
  """Initial parameters with gains random, and what starts at (nearly) 0: biases and the CLS token."""
  rng = np.random.default_rng(1)
  tree = with_random_gains(layout.unstack(INIT(config, jax.random.key(0))))
  drawn = jax.tree.map(lambda x: x if np.abs(x).max() > 1e-4 else jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)
  return layout.native(drawn, config)


def batch(config, rows=8, seed=0):
  rng = np.random.default_rng(seed)
  shape = (rows, config.image_size, config.image_size, config.channels)
  return {'images': rng.standard_normal(shape).astype(np.float32),
          'labels': rng.integers(0, config.num_classes, rows).astype(np.int32)}


def mean_loss(config, p, b):
  x, _ = transformer.stream(config, p, b['images'])
  losses, weights = vit.row_losses(config, p, transformer.final_norm(config, p, x), b)
  return jnp.sum(losses) / jnp.sum(weights)


# --- against transformers


@functools.cache
def theirs(scheme='pre', loop='unrolled'):
  """(config, params, reference arrays) of transformers' ViTForImageClassification."""
  meta, arrays = fixture('vit')
  hf = meta['config']
  config = ModelConfig(**VIT, image_size=hf['image_size'], patch_size=hf['patch_size'], channels=hf['num_channels'],
                       num_classes=7, d_model=hf['hidden_size'], d_ff=hf['intermediate_size'], scheme=scheme, loop=loop,
                       num_layers=hf['num_hidden_layers'], num_heads=hf['num_attention_heads'],
                       norm_eps=hf['layer_norm_eps'])
  return config, layout.native(tree(config, lambda n: jnp.asarray(arrays[f'weight/{n}'])), config), arrays


def tree(config, get):
  """Our parameters from `get(name)`, which returns a Hugging Face weight or bias."""
  D, H, h = config.d_model, config.num_heads, config.head_dim
  norm = lambda at: {'gain': get(f'{at}.weight'), 'bias': get(f'{at}.bias')}
  def layer(at):
    attn = {n: get(f'{at}.attention.{n}_proj.weight').reshape(H, h, D).transpose(2, 0, 1) for n in 'qkv'}
    attn |= {f'{n}_bias': get(f'{at}.attention.{n}_proj.bias') for n in 'qkvo'}
    mlp = {ours: get(f'{at}.mlp.{name}.weight').T for ours, name in (('up', 'fc1'), ('down', 'fc2'))}
    mlp |= {f'{ours}_bias': get(f'{at}.mlp.{name}.bias') for ours, name in (('up', 'fc1'), ('down', 'fc2'))}
    return {'attn': attn | {'o': get(f'{at}.attention.o_proj.weight').T.reshape(H, h, D)}, 'mlp': mlp,
            'attn_in_norm': norm(f'{at}.layernorm_before'), 'mlp_in_norm': norm(f'{at}.layernorm_after')}
  at = 'vit.embeddings'
  patch = get(f'{at}.patch_embeddings.projection.weight').transpose(2, 3, 1, 0)
  return {'embed': {'patch': patch.reshape(-1, D), 'patch_bias': get(f'{at}.patch_embeddings.projection.bias'),
                    'cls': get(f'{at}.cls_token')[0, 0], 'positions': get(f'{at}.position_embeddings')[0]},
          'layers': {str(l): layer(f'vit.layers.{l - 1}') for l in config.layer_ids},
          'final_norm': norm('vit.layernorm'),
          'head': {'table': get('classifier.weight'), 'bias': get('classifier.bias')}}


@pytest.mark.parametrize('scheme, loop, kind', [('pre', 'unrolled', ''), ('pre', 'scan', ''), ('lns', 'scan', 'lns_')])
def test_logits_and_all_states_are_those_of_transformers(scheme, loop, kind):
  config, p, right = theirs(scheme, loop)
  logits, out = jax.jit(lambda p: lns_jax.apply(config, p, {'images': right['images']}, ['embed', '*/out']))(p)
  states = np.stack([out['embed'], *(out[f'layers/{l}/out'] for l in (1, 2, 3))])
  assert logits.shape == (2, 7) and states.shape == (4, 2, 10, 24) and np.abs(right['logits']).max() > 1
  np.testing.assert_allclose(logits, right[f'{kind}logits'], **CLOSE)
  np.testing.assert_allclose(states, right[f'{kind}states'], **CLOSE)
  assert np.abs(right['lns_logits'] - right['logits']).max() > 0.1


def test_parameters_are_those_of_transformers():
  config, p, right = theirs()
  shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
  assert jax.tree.map(jnp.shape, p) == jax.tree.map(jnp.shape, shapes)
  assert len(jax.tree.leaves(p)) == sum(n.startswith('weight/') for n in right)


# --- known fault W1


def test_tokens_states_and_factors():
  """L = 3, a 4 x 4 image in patches of 2, CLS: 5 tokens, 4 states; factors 1, 1/sqrt(2), 1/sqrt(3) on both norms."""
  config, plain = model(scheme='lns'), model()
  p, b = params(config), batch(config)
  states = STATES(config, p, b['images'])
  assert states.shape == (4, 8, 5, 16)
  _, out = jax.jit(lambda p: lns_jax.apply(config, p, b, ['layers/*/*_x', 'layers/*/*_in']))(p)
  for l, factor in ((1, 1.0), (2, 0.7071068), (3, 0.5773503)):
    for sub in ('attn', 'mlp'):
      x = np.asarray(out[f'layers/{l}/{sub}_x'], np.float64)
      norm = p['layers'][str(l)][f'{sub}_in_norm']
      scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_eps)
      expected = factor * (scaled * norm['gain'] + norm['bias'])
      np.testing.assert_allclose(out[f'layers/{l}/{sub}_in'], expected, atol=1e-5)
  # Nothing of it in the final norm: the same states give the same logits.
  np.testing.assert_array_equal(transformer.head(config, p, states[3]), transformer.head(plain, p, states[3]))


@pytest.mark.parametrize('cls', [True, False])
def test_variance_with_the_cls_token_or_without_is_numpys(cls):
  config = model(scheme='lns')
  p, batches = params(config), [batch(model(), seed=s) for s in (0, 1)]
  s = np.concatenate([np.asarray(STATES(config, p, b['images']), np.float64) for b in batches], axis=1)
  counted = s if cls else s[:, :, 1:]
  found = depth.variance(config, p, batches, cls=cls)
  np.testing.assert_allclose(found.value, counted.var(-1).mean((1, 2)), rtol=1e-5)
  assert found.tokens == 16 * (5 if cls else 4)


def test_without_a_cls_token_the_choice_changes_nothing():
  config = model(pooling='mean')
  p, b = params(config), batch(model())
  inside, out = (depth.variance(config, p, [b], cls=cls) for cls in (True, False))
  np.testing.assert_array_equal(inside.value, out.value)
  assert inside.tokens == 8 * 4


def test_images_of_padding_count_nothing():
  config = model()
  p, b = params(config), batch(config)
  kept = {k: v[:5] for k, v in b.items()}
  padded = b | {'weights': np.float32([1, 1, 1, 1, 1, 0, 0, 0])}
  for name, found in depth.profile(config, p, [padded]).items():
    expected = depth.profile(config, p, [kept])[name]
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-5, atol=1e-6)
    assert found.tokens == expected.tokens


def test_removal_is_the_rise_of_the_cross_entropy():
  config = model()
  p, b = params(config), batch(config)
  found = depth.layer_drop(config, p, [b])
  def loss(c, q):
    logits = np.asarray(FORWARD(c, q, b['images']), np.float64)
    return np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(8), b['labels']])
  assert found['baseline'].value == pytest.approx(loss(config, p), rel=1e-5)
  rises = [loss(*lns_jax.remove_layers(config, p, [l])) - loss(config, p) for l in (1, 2, 3)]
  np.testing.assert_allclose(found['layer_drop'].value, rises, rtol=1e-3, atol=1e-6)


# --- input and head


def test_patches_are_in_rows_and_flattened_by_row_column_channel():
  config = model(channels=2)
  image = np.arange(32, dtype=np.float32).reshape(1, 4, 4, 2)
  found = vit.patches(config, image)
  assert found.shape == (1, 4, 8)
  np.testing.assert_array_equal(found[0, 1], image[0, :2, 2:].reshape(-1))
  np.testing.assert_array_equal(found[0, 2], image[0, 2:, :2].reshape(-1))


def test_embedding_is_the_projection_with_bias_after_cls_plus_positions():
  config = model()
  p, b = params(config), batch(config)
  e, found = p['embed'], np.asarray(transformer.enter(config, p, b['images'])[0])
  np.testing.assert_allclose(found[:, 0], np.broadcast_to(e['cls'] + e['positions'][0], (8, 16)), atol=1e-6)
  last = b['images'][:, 2:, 2:].reshape(8, 4) @ np.asarray(e['patch']) + e['patch_bias'] + e['positions'][4]
  np.testing.assert_allclose(found[:, 4], last, atol=1e-5)


def test_mean_pooling_is_the_mean_over_patches_of_the_final_norm():
  config = model(pooling='mean')
  p, b = params(config), batch(config)
  assert 'cls' not in p['embed'] and p['embed']['positions'].shape == (4, 16)
  last = STATES(config, p, b['images'])[-1]
  pooled = norms.Norm(config).apply({'params': p['final_norm']}, last).mean(1)
  np.testing.assert_allclose(FORWARD(config, p, b['images']),
                             pooled @ p['head']['table'].T + p['head']['bias'], atol=1e-5)


@pytest.mark.parametrize('shape', [(8, 4, 4, 3), (8, 6, 6, 1), (4, 4, 1)])
def test_images_of_another_shape_are_refused(shape):
  config = model()
  with pytest.raises(UserError, match=r'\[B, 4, 4, 1\].*' + str(list(shape)).replace('[', r'\[')):
    FORWARD(config, params(config), np.zeros(shape, np.float32))


def test_a_batch_of_text_is_refused():
  config = model()
  p, b = params(config), batch(config)
  with pytest.raises(UserError, match="family vit reads 'images', but the batch has .*'tokens'"):
    lns_jax.apply(config, p, {'tokens': np.zeros((1, 5), np.int32)})
  with pytest.raises(UserError, match='segment_ids .* vit takes none'):
    lns_jax.states(config, p, b['images'], segment_ids=np.ones((8, 5), np.int32))


def test_start():
  config = ModelConfig(**VIT, d_model=64, num_heads=4, d_ff=128, num_layers=1)
  p = INIT(config, jax.random.key(0))
  for found in (p['embed']['patch'], p['embed']['positions'], p['head']['table'], p['layers']['1']['mlp']['up']):
    assert np.std(found) == pytest.approx(0.02, rel=0.03)
  assert np.std(p['embed']['cls']) == pytest.approx(1e-6, rel=0.4)
  assert not p['embed']['patch_bias'].any() and not p['head']['bias'].any()


# --- what the decoder promises, a ViT does


def test_every_block_changes_the_logits():
  config = model()
  p, b = params(config), batch(config)
  forward = lambda q: FORWARD(config, q, b['images'])
  for l in '123':
    for sub, matrix in (('attn', 'o'), ('mlp', 'down')):
      changed = jax.tree.map(lambda x: x, p)
      changed['layers'][l][sub][matrix] = jnp.roll(p['layers'][l][sub][matrix], 1, axis=0)
      assert np.abs(forward(changed) - forward(p)).max() > 1e-4, (l, sub)


def test_the_first_token_sees_the_last_patch():
  config = model()
  p, b = params(config), batch(config)
  other = b['images'].copy()
  other[:, 2:, 2:] += 1
  before, after = (STATES(config, p, images) for images in (b['images'], other))
  np.testing.assert_array_equal(before[0, :, :4], after[0, :, :4])
  assert np.abs(before[1, :, 0] - after[1, :, 0]).max() > 1e-3


@pytest.mark.parametrize('scheme', [pytest.param('lns', marks=pytest.mark.slow), 'layerscale', pytest.param(
    'mix', marks=pytest.mark.slow)])
def test_scan_equals_unrolled(scheme):
  config, scanned = (model(scheme=scheme, mix_fraction=0.4, loop=loop) for loop in ('unrolled', 'scan'))
  p, b = params(config), batch(config)
  value, grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(config, q, b)))(p)
  other, other_grads = jax.jit(jax.value_and_grad(lambda q: mean_loss(scanned, q, b)))(layout.stack(p, scanned))
  assert float(other) == pytest.approx(float(value), rel=1e-6)
  other_grads = layout.unstack(other_grads)
  for tree in (grads, other_grads):  # a softmax does not feel a bias of its keys: what is left is rounding
    for layer in tree['layers'].values():
      assert np.abs(layer['attn'].pop('k_bias')).max() < 1e-6
  leaves_close(other_grads, grads, 2e-5)
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_eight_devices_see_what_one_does():
  config = model(d_model=32, num_heads=4, num_classes=6)
  p, b = params(config), batch(config)
  mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  alone = STATES(config, p, b['images'])
  with sharding.use(mesh):
    spread = jax.jit(lambda q, images: lns_jax.states(config, q, images),
                     in_shardings=(sharding.params(mesh, config), sharding.batch(mesh)))(p, b['images'])
  np.testing.assert_allclose(spread, alone, atol=2e-6 * np.abs(alone).max())


def test_admin_reads_a_batch_of_images():
  config = model(scheme='admin')
  p = transformer.init(config, jax.random.key(0), batch(config))
  assert len({float(p['layers'][l]['mlp_a'][0]) for l in '123'}) == 3
