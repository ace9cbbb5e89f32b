"""Qwen2.5-VL: what transformers computes for a tiny one, and that both towers are ordinary models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import vl_tiny
from lns_jax import depth
from lns_jax.errors import UserError
from lns_jax.models import grids, tower, transformer, vl

apply = jax.jit(transformer.apply, static_argnums=0)
forward = jax.jit(vl.forward, static_argnums=0)
vl_states = jax.jit(vl.states, static_argnums=0)
CLOSE = dict(rtol=0, atol=1e-4)  # of numbers of order 1 to 30; 4e-5 was the largest difference seen


@pytest.fixture(scope='module')
def reference():
  return vl_tiny.reference()


@pytest.fixture(scope='module')
def model():
  return vl_tiny.model()


@pytest.fixture(scope='module')
def batch(model, reference):
  return vl.arrange(model[0], reference['tokens'], reference['pixels'], reference['grid'],
                    segment_ids=reference['mask'])


def real(reference, values):
  """The entries [..., B, T, n] of tokens that are not padding."""
  return np.asarray(values)[..., reference['mask'] > 0, :]


def test_positions_in_the_text_are_those_of_transformers(reference, batch):
  theirs = np.moveaxis(reference['positions'], 0, -1)
  np.testing.assert_array_equal(real(reference, batch['coordinates']), real(reference, theirs))


def test_embeddings_of_the_images_are_those_of_transformers(model, reference, batch):
  config, params = model
  found = jax.jit(lambda p: vl.image_embeddings(config, p, batch['vision']))(params)
  cells = [h * w // 4 for _, h, w in reference['grid']]
  rows = np.concatenate([found[n, :c] for n, c in enumerate(cells)])
  np.testing.assert_allclose(rows, reference['images'], **CLOSE)


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_logits_and_the_states_of_both_towers_are_those_of_transformers(reference, batch, loop):
  config, params = vl_tiny.model(loop=loop)
  logits, states = jax.jit(lambda p: (vl.forward(config, p, batch), vl.states(config, p, batch)))(params)
  np.testing.assert_allclose(real(reference, logits), real(reference, reference['logits']), **CLOSE)
  np.testing.assert_allclose(real(reference, states['text']), real(reference, reference['text_states']), **CLOSE)
  patches = np.concatenate([states['vision'][:, n, :h * w] for n, (_, h, w) in enumerate(reference['grid'])], axis=1)
  np.testing.assert_allclose(patches, reference['vision_states'], **CLOSE)


def test_windows_count_from_the_corner_and_are_smaller_at_the_edges():
  # 3 x 5 cells of 2 x 2 patches in windows of 2 x 2 cells: two rows of three windows
  windows = grids.patch_windows(6, 10, 2, 2)
  of_cells = [1, 1, 2, 2, 3, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6]
  np.testing.assert_array_equal(windows, np.repeat(of_cells, 4))


def test_coordinates_by_hand():
  # text, an image of 1 x 2 cells, text; padding; a second document starts at 0
  tokens, segments = np.array([5, 9, 9, 5, 5, 5, 5]), np.array([1, 1, 1, 1, 2, 2, 0])
  np.testing.assert_array_equal(
      grids.text_coordinates(tokens, segments, 9, [(2, 4)], 2, 0),
      [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3], [0, 0, 0], [1, 1, 1], [0, 0, 0]])


def test_a_text_without_images_is_that_of_the_decoder_alone(model):
  config, params = model
  tokens = np.arange(12).reshape(2, 6)
  batch = vl.arrange(config, tokens, np.zeros((0, 24)), np.zeros((0, 3)))
  np.testing.assert_allclose(forward(config, params, batch), apply(config.text, params['text'], {'tokens': tokens})[0],
                             atol=1e-5)


def test_a_row_by_itself_is_as_among_others(model, reference):
  # its images are of different length and no token is padding: cells that are padding must go nowhere
  one = vl.arrange(model[0], reference['tokens'][:1], reference['pixels'][:92], reference['grid'][:2])
  assert (one['slots'] == one['tokens'].size).sum() == 7
  np.testing.assert_allclose(forward(*model, one)[0], reference['logits'][0], **CLOSE)


@pytest.mark.slow
def test_padding_of_images_changes_nothing(model, reference, batch):
  config, params = model
  longer = vl.arrange(config, reference['tokens'], reference['pixels'], reference['grid'],
                      segment_ids=reference['mask'], most_patches=72)
  assert longer['vision']['patches'].shape[1] == 72
  np.testing.assert_allclose(real(reference, forward(config, params, longer)),
                             real(reference, forward(config, params, batch)), atol=1e-5)


@pytest.mark.parametrize('change, words', [
    (dict(grid=[[1, 6, 10], [1, 8, 4]]), ['116 patches', '29 image tokens', '2 images']),
    (dict(grid=[[1, 6, 10], [1, 4, 8], [1, 4, 6]], cut=1), ['115 patches']),
    (dict(grid=[[2, 6, 10], [1, 8, 4], [1, 4, 6]]), ['image 0', '2 frames', 'videos']),
    (dict(grid=[[1, 5, 12], [1, 8, 4], [1, 4, 6]]), ['image 0', '5 x 12', '6 x 12']),
    (dict(grid=[[1, 4, 6], [1, 8, 4], [1, 6, 10]]), ['row 0', 'image tokens at']),
    (dict(video=True), ['41', 'video']),
])
def test_what_does_not_fit_is_refused(model, reference, change, words):
  tokens = reference['tokens'].copy()
  if change.get('video'):
    tokens[0, 0] = 41
  pixels = reference['pixels'][change.get('cut', 0):]
  with pytest.raises(UserError) as e:
    vl.arrange(model[0], tokens, pixels, np.array(change.get('grid', reference['grid'])),
               segment_ids=reference['mask'])
  assert all(w in str(e.value) for w in words), e.value


def test_patches_of_another_size_are_refused(model, batch):
  with pytest.raises(UserError, match='12 numbers.*3 x 2 x 2 x 2 = 24'):
    tower.embed(model[0].vision, model[1]['vision'], batch['vision']['patches'][..., :12])
  with pytest.raises(UserError, match='vl.arrange'):
    transformer.forward(model[0].vision, model[1]['vision'], batch['vision']['patches'])


def test_a_removed_layer_leaves_the_others_as_they_are(model, batch):
  config, params = model
  config_less, less = vl.remove_layers(config, params, 'vision', [2])
  assert config_less.vision.layer_ids == (1, 3) and config_less.text == config.text
  assert [config_less.vision.window(l) for l in (1, 3)] == [8, 8]
  flat = traverse_util.flatten_dict(params['vision'], sep='/')
  for name, leaf in traverse_util.flatten_dict(less['vision'], sep='/').items():
    np.testing.assert_array_equal(leaf, flat[name])
  silent = jax.tree.map(jnp.zeros_like, params['vision']['layers']['2'])  # adds nothing to the stream
  quiet = params | {'vision': params['vision'] | {'layers': params['vision']['layers'] | {'2': silent}}}
  without = forward(config_less, less, batch)
  np.testing.assert_allclose(without, forward(config, quiet, batch), atol=1e-5)
  assert np.abs(without - forward(config, params, batch)).max() > 1e-2
  with pytest.raises(UserError, match="no tower 'visoin'.*'vision'"):
    vl.remove_layers(config, params, 'visoin', [2])


@pytest.mark.parametrize('name', ['vision', pytest.param('text', marks=pytest.mark.slow)])
def test_measures_of_depth_take_either_tower(model, batch, name):
  config, params = model
  of = batch['vision'] if name == 'vision' else vl.text_batch(config, params, batch)
  tower_config, p = getattr(config, name), params[name]
  L = tower_config.num_layers
  states = np.asarray(vl_states(config, params, batch)[name], np.float64)
  keep = np.asarray(of['segment_ids']) > 0
  found = depth.profile(tower_config, p, [of])
  np.testing.assert_allclose(found['variance'].value, states[:, keep].var(axis=-1).mean(axis=-1), rtol=1e-5)
  unit = states[:, keep] / np.linalg.norm(states[:, keep], axis=-1, keepdims=True)
  angles = np.arccos(np.sum(unit[:-1] * unit[1:], axis=-1)) / np.pi
  np.testing.assert_allclose(found['angular'].value[0, :L], angles.mean(axis=-1), rtol=1e-4)
  drop = depth.layer_drop(tower_config, p, [of], score_fn=total)
  expected = []
  for l in tower_config.layer_ids:
    c, q = transformer.remove_layers(tower_config, p, [l])
    expected.append(np.mean(total(apply(c, q, of)[0], of)[0]) - drop['baseline'].value)
  np.testing.assert_allclose(drop['layer_drop'].value, expected, atol=1e-4)


def total(logits, batch):
  """A score: the mean of what leaves the model, a row."""
  return jnp.mean(logits, axis=(1, 2)), jnp.ones(len(logits))


def test_a_tower_predicts_nothing_by_itself(model, batch):
  with pytest.raises(UserError, match='score_fn'):
    depth.layer_drop(model[0].vision, model[1]['vision'], [batch['vision']])


def test_towers_that_do_not_fit_are_refused(model):
  config = model[0]
  with pytest.raises(UserError, match='out_width = 20 must be vl.text.d_model = 24'):
    dataclasses.replace(config, vision=dataclasses.replace(config.vision, out_width=20))
  with pytest.raises(UserError, match='vl.text must be a model of family decoder'):
    dataclasses.replace(config, text=config.vision)


def test_fresh_parameters_have_the_shapes_of_imported_ones(model):
  config, params = model
  shapes = lambda tree: jax.tree.map(jnp.shape, tree)
  assert shapes(jax.eval_shape(lambda: vl.init(config, jax.random.key(0)))) == shapes(params)
