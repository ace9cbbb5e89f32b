"""Every picture of a diagnosis has a file of its own, and the parts of its report say what they show."""

import re

import numpy as np
import pytest

from lns_jax.depth import diagnosis, sections_inside


def test_names_of_files_are_the_words_of_the_label():
  assert diagnosis.file_names(['Rise of the loss, layer 7', 'Loss']) == ['rise_of_the_loss_layer_7', 'loss']


LONG = 'Rise of the loss when n layers from layer l on are removed from a run with a rather long name, '


@pytest.mark.parametrize('labels', [
    [LONG + 'one', LONG + 'two'], ['of a-b', 'of a_b'], ['of A', 'of a'], ['of 模型', 'of 型号'], ['twice', 'twice'],
    ['', ' '], [f'{LONG}{i}' for i in range(50)]])
def test_labels_that_would_share_a_name_do_not(labels):
  names = diagnosis.file_names(labels)
  assert len(set(names)) == len(labels)
  assert all(re.fullmatch('[0-9a-z_]{1,80}', name) for name in names)


def test_a_name_stays_when_other_pictures_come():
  short, long = 'Loss of lns', LONG + 'one'
  alone = diagnosis.file_names([short, long])
  assert diagnosis.file_names([LONG + 'two', 'other', long, short])[2:] == alone[::-1]


def _projected(frequency, points):
  """(models, arrays) of a projection of the embedding and of layers 1 and 7."""
  found = {'projection_layers': [0, 1, 7], 'projection_explained': [[0.5, 0.25], [0.2, 0.1], [0.04, 0.02]]}
  return {'x': found}, {'x': {'projection_points': points, 'projection_frequency': frequency}}


def test_a_projection_shows_its_share_and_what_it_tells_of_frequency():
  rng = np.random.default_rng(0)
  frequency = np.exp(rng.normal(size=400)) / 1000
  lines = np.stack([np.log(frequency), rng.normal(size=400)], axis=1)
  points = np.stack([lines, rng.normal(size=(400, 2)), lines @ [[0, 1], [2, 0]]])
  section = sections_inside.projection(*_projected(frequency, points))
  titles = [axes.get_title('left') for axes in section.pictures[0].figure.axes[:3]]
  assert titles == ['emb, 75%', 'layer 1, 30%', 'layer 7, 6%']
  assert 'goes from 1.0 at the embedding to 1.0 behind layer 7 in x' in section.found[0]  # a linear map of it is left
  assert sections_inside._told(points[1], frequency) < 0.05
  np.testing.assert_allclose(section.pictures[0].figure.axes[0].collections[0].get_clim(),
                             [1000 * frequency.min(), 1000 * frequency.max()])


def test_a_projection_of_images_is_shaded_by_position():
  points = np.random.default_rng(0).normal(size=(3, 20, 2))
  models, arrays = _projected(None, points)
  arrays['x'] = {'projection_points': points, 'projection_position': np.arange(20)}
  section = sections_inside.projection(models, arrays)
  assert section.found == [] and 'its place in the image' in section.how
  assert section.pictures[0].figure.axes[-1].get_xlabel() == 'position in the image'


def test_there_is_no_projection_where_none_was_measured():
  assert sections_inside.projection({'x': {'layers': 2}}, {'x': {}}) is None
  assert sections_inside.projection({'x': {'projection_layers': [0]}}, {}) is None
