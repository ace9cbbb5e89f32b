"""Pictures as patches: sizes by the rule, the order of patches by hand, numbers as the original processor has them."""

import math

import hf_fixtures
import numpy as np
import pytest
from PIL import Image

from lns_jax.data import pictures
from lns_jax.errors import UserError


def drawn(h: int, w: int, seed: int) -> np.ndarray:
  """A made picture; tests/make_vl_fixtures.py draws the same."""
  y, x = np.mgrid[:h, :w]
  base = np.stack([127 + 120 * np.sin(x / 7), 127 + 120 * np.cos(y / 5), (x * y) % 256], -1)
  return np.clip(base + np.random.default_rng(seed).normal(0, 20, (h, w, 3)), 0, 255).astype(np.uint8)


@pytest.mark.parametrize('name', ['plain', 'small', 'large'])
def test_patches_are_those_of_transformers(name):
  meta, arrays = hf_fixtures.fixture('qwen2_5_vl_pictures')
  case = meta['cases'][name]
  patches, grid = pictures.Processor(**case['bounds']).patches(drawn(*case['size']))
  assert list(grid) == arrays[f'{name}/grid'].tolist()
  assert patches.shape == (math.prod(grid), 3 * 2 * 14 * 14)
  np.testing.assert_allclose(patches[:, ::case['every']], arrays[f'{name}/patches'], rtol=0, atol=1e-5)


@pytest.mark.parametrize('size, bounds, expected', [
    ((56, 84), {}, (56, 84)),
    ((57, 83), {}, (56, 84)),
    ((20, 31), {}, (56, 84)),  # grown by sqrt(3136 / 620) = 2.249: 44.98 and 69.7, rounded up to 28s
    ((300, 200), {'max_pixels': 28 * 28 * 20}, (140, 84)),  # shrunk by 1.956: 153.4 and 102.2, rounded down
    ((30, 5900), {'max_pixels': 28 * 28 * 20}, (28, 1736)),  # shrunk by 3.36: 8.9, but no side is less than a cell
])
def test_sizes_are_multiples_of_a_cell_within_the_bounds(size, bounds, expected):
  assert pictures.Processor(**bounds).size(*size) == expected
  assert pictures.Processor(**bounds).cells(*size) == expected[0] * expected[1] // 784


def test_patches_of_a_cell_follow_each_other_and_channels_come_first():
  image = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3)
  processor = pictures.Processor(patch_size=2, min_pixels=16, max_pixels=64, mean=(0, 0, 0), std=(1, 1, 1))
  patches, grid = processor.patches(image)
  assert grid == (1, 2, 4)
  corners = [(0, 0), (0, 2), (2, 0), (2, 2), (0, 4), (0, 6), (2, 4), (2, 6)]
  expected = [image[r:r + 2, c:c + 2].transpose(2, 0, 1) for r, c in corners]
  expected = np.repeat(np.stack(expected)[:, :, None], 2, axis=2).reshape(8, -1)  # channel, frame, row, column
  np.testing.assert_allclose(patches * 255, expected, atol=1e-4)


def test_files_arrays_and_images_give_the_same(tmp_path):
  image = drawn(30, 60, 1)
  Image.fromarray(image).save(tmp_path / 'p.png')
  processor = pictures.Processor()
  wanted = processor.patches(image)[0]
  for picture in (tmp_path / 'p.png', str(tmp_path / 'p.png'), Image.fromarray(image)):
    np.testing.assert_array_equal(processor.patches(picture)[0], wanted)
  grey = image[..., 0]
  np.testing.assert_array_equal(processor.patches(grey)[0], processor.patches(np.stack([grey] * 3, -1))[0])


def test_a_picture_is_turned_as_its_file_says(tmp_path):
  image = Image.fromarray(drawn(30, 60, 1))
  exif = Image.Exif()
  exif[0x0112] = 6  # the camera was held on its side
  image.save(tmp_path / 'p.png', exif=exif)
  assert pictures.opened(tmp_path / 'p.png').size == (30, 60)


def test_what_is_no_picture_is_refused(tmp_path):
  (tmp_path / 'p.png').write_bytes(b'no picture')
  with pytest.raises(UserError, match='p.png is no picture'):
    pictures.opened(tmp_path / 'p.png')
  with pytest.raises(UserError, match='no picture at'):
    pictures.opened(tmp_path / 'q.png')
  with pytest.raises(UserError, match='float64'):
    pictures.opened(np.zeros((4, 4, 3)))
  with pytest.raises(UserError, match='3 x 700 .* too narrow'):
    pictures.Processor().size(3, 700)
  with pytest.raises(UserError, match='3136 to 700 pixels'):
    pictures.Processor(max_pixels=700)
