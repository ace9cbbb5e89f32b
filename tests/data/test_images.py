"""Images: what is read, how it is standardised and split, and what is refused."""

import gzip
import struct

import numpy as np
import pytest

from lns_jax.config import DataConfig, ModelConfig
from lns_jax.data import images
from lns_jax.errors import UserError

MODEL = ModelConfig(family='vit', causal=False, image_size=4, patch_size=2, channels=1, num_classes=3, d_model=16,
                    num_heads=2)
RNG = np.random.default_rng(0)
PIXELS, LABELS = RNG.integers(0, 256, (20, 4, 4)).astype(np.uint8), (np.arange(20) % 3).astype(np.uint8)


def data(source, **settings) -> DataConfig:
  return DataConfig(source=str(source), **settings)


def npz(tmp_path, **arrays):
  np.savez(tmp_path / 'x.npz', **arrays)
  return tmp_path / 'x.npz'


def test_channels_are_standardised_by_the_training_split(tmp_path):
  found = images.open(data(npz(tmp_path, x_train=PIXELS[:15], y_train=LABELS[:15], x_test=PIXELS[15:],
                               y_test=LABELS[15:])), MODEL)
  assert (found.num_rows('train'), found.num_rows('validation')) == (15, 5)
  mean, std = PIXELS[:15].mean(dtype=np.float64), PIXELS[:15].std(dtype=np.float64)
  row = found.row('validation', 2)
  np.testing.assert_allclose(row['images'][..., 0], (PIXELS[17] - mean) / std, rtol=1e-5, atol=1e-6)
  assert row['labels'] == LABELS[17] and row['weights'] == 1 and row['images'].dtype == np.float32


@pytest.mark.parametrize('zipped', [False, True])
def test_files_of_the_mnist_form_are_read(tmp_path, zipped):
  for prefix, part in (('train', slice(0, 15)), ('t10k', slice(15, 20))):
    for name, array in (('images-idx3-ubyte', PIXELS[part]), ('labels-idx1-ubyte', LABELS[part])):
      content = bytes([0, 0, 8, array.ndim]) + struct.pack(f'>{array.ndim}I', *array.shape) + array.tobytes()
      (tmp_path / (f'{prefix}-{name}' + '.gz' * zipped)).write_bytes(gzip.compress(content) if zipped else content)
  found = images.open(data(tmp_path), MODEL)
  assert (found.num_rows('train'), found.num_rows('validation')) == (15, 5)
  assert [found.row('validation', i)['labels'] for i in range(5)] == list(LABELS[15:])
  (tmp_path / ('t10k-labels-idx1-ubyte' + '.gz' * zipped)).unlink()
  with pytest.raises(UserError, match='no t10k-labels-idx1-ubyte'):
    images.open(data(tmp_path), MODEL)


def test_a_held_out_split_is_always_the_same_and_apart_from_training(tmp_path):
  path = npz(tmp_path, images=PIXELS, labels=LABELS)
  a, b = (images.open(data(path, validation_fraction=0.2, seed=s), MODEL) for s in (0, 1))
  assert a.hash == b.hash and (a.num_rows('train'), a.num_rows('validation')) == (16, 4)
  raw = lambda split: {a.row(split, i)['images'].tobytes() for i in range(a.num_rows(split))}
  assert not raw('train') & raw('validation') and len(raw('train') | raw('validation')) == 20
  other = images.open(data(npz(tmp_path, images=PIXELS[::-1], labels=LABELS)), MODEL)
  assert other.hash != a.hash


def test_evaluation_sees_every_image_once_and_padding_without_weight(tmp_path):
  found = images.open(data(npz(tmp_path, images=PIXELS, labels=LABELS), validation_fraction=0.25), MODEL)
  batches = list(found.eval_batches('validation', 3))
  assert [list(b['weights']) for b in batches] == [[1, 1, 1], [1, 1, 0]]
  assert batches[0]['images'].shape == (3, 4, 4, 1)


def test_digits_are_those_of_scikit_learn():
  model = ModelConfig(family='vit', causal=False, image_size=8, patch_size=2, channels=1, num_classes=10, d_model=16,
                      num_heads=2)
  found = images.open(data('digits', validation_fraction=0.2), model)
  assert (found.num_rows('train'), found.num_rows('validation')) == (1438, 359)


@pytest.mark.parametrize('arrays, words', [
    ({'pictures': PIXELS}, 'pictures, but images and labels'),
    ({'images': PIXELS[:, :2, :2], 'labels': LABELS}, r'shape \[2, 2, 1\], the model wants \[4, 4, 1\]'),
    ({'images': PIXELS, 'labels': LABELS[:3]}, '20 images and labels'),
    ({'images': PIXELS, 'labels': LABELS + 1}, 'labels from 1 to 3, but model.num_classes is 3'),
    ({'images': PIXELS, 'labels': LABELS / 2}, 'type float64'),
    ({'images': PIXELS, 'labels': LABELS, 'validation_images': PIXELS}, 'has validation_images alone'),
    ({'x_train': PIXELS, 'y_train': LABELS, 'y_test': LABELS}, 'has y_test alone'),
    ({'images': PIXELS, 'labels': LABELS, 'validation_images': PIXELS[:0], 'validation_labels': LABELS[:0]},
     'a split without images'),
    ({'images': PIXELS[:0], 'labels': LABELS[:0]}, 'a split without images'),
    ({'images': PIXELS[:1], 'labels': LABELS[:1]}, 'one image, and no second'),
    ({'images': np.where(PIXELS == 0, np.nan, PIXELS), 'labels': LABELS}, 'pixels of size nan'),
    ({'images': PIXELS * 1e30, 'labels': LABELS}, 'pixels of size 2.*e[+]32'),
    ({'images': PIXELS + 1j, 'labels': LABELS}, 'images of type complex128'),
    ({}, 'has no arrays'),
])
def test_what_does_not_fit_the_model_is_refused(tmp_path, arrays, words):
  with pytest.raises(UserError, match=words):
    images.open(data(npz(tmp_path, **arrays), validation_fraction=0.5), MODEL)


def spoiled(content: bytes) -> dict[str, bytes]:
  middle = len(content) // 2
  return {'cut': content[:middle], 'flipped': content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1:],
          'empty': b'', 'a page': b'<html>'}


@pytest.mark.parametrize('kind', ['cut', 'flipped', 'empty', 'a page', 'one array', 'objects'])
def test_a_damaged_npz_is_named_in_one_sentence(tmp_path, kind):
  path = npz(tmp_path, images=PIXELS, labels=LABELS)
  if kind == 'one array':
    with open(path, 'wb') as file:
      np.save(file, PIXELS)
  elif kind == 'objects':
    npz(tmp_path, images=np.array([PIXELS, None], object), labels=LABELS)
  else:
    path.write_bytes(spoiled(path.read_bytes())[kind])
  with pytest.raises(UserError, match=r'x\.npz is damaged, or no \.npz file of plain arrays'):
    images.open(data(path), MODEL)


@pytest.mark.parametrize('kind', ['cut', 'flipped', 'empty', 'a page', 'header'])
@pytest.mark.parametrize('zipped', [False, True])
def test_a_damaged_idx_file_is_named_in_one_sentence(tmp_path, kind, zipped):
  header = bytes([0, 0, 8, 3]) + struct.pack('>3I', 20, 4, 4)
  content = header + PIXELS.tobytes()
  if kind == 'header':
    content = b'\0\0\x0d' + content[3:]  # floats
  stored = gzip.compress(content) if zipped else content
  if kind != 'header':
    stored = spoiled(stored)[kind]
  if kind == 'flipped' and not zipped:
    stored = bytes([255]) + content[1:]  # a pixel has no checksum, the header has a form
  (tmp_path / ('train-images-idx3-ubyte' + '.gz' * zipped)).write_bytes(stored)
  with pytest.raises(UserError, match='train-images-idx3-ubyte.* is damaged, or no idx file'):
    images.open(data(tmp_path), MODEL)


def test_a_held_out_split_leaves_images_to_train_on(tmp_path):
  found = images.open(data(npz(tmp_path, images=PIXELS, labels=LABELS), validation_fraction=0.999), MODEL)
  assert (found.num_rows('train'), found.num_rows('validation')) == (1, 19)


def test_an_unknown_source_lists_those_that_there_are():
  with pytest.raises(UserError, match="'nowhere' is no source of images; there are digits, a .npz file"):
    images.open(data('nowhere'), MODEL)
