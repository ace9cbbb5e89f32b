"""Labelled images in memory: scikit-learn's digits, .npz files, and files of the MNIST form."""

import gzip
import hashlib
import json
import math
import pathlib
import struct
import zipfile
import zlib

import numpy as np

from lns_jax.config import DataConfig, ModelConfig
from lns_jax.data import order
from lns_jax.errors import UserError

SOURCES = 'digits, a .npz file, a folder with train-images-idx3-ubyte[.gz] and its three companions'

LARGEST = 1e18  # pixels whose square, summed over an image, is still a float32


class Source:
  """Random access to {'images' float32 [S, S, C], 'labels' int32 [], 'weights' float32 []}, images standardised."""

  def __init__(self, images: np.ndarray, labels: np.ndarray, mean: np.ndarray, std: np.ndarray):
    self._images, self._labels, self._mean, self._std = images, labels, mean, std

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index) -> order.Batch:
    image = (self._images[index].astype(np.float32) - self._mean) / self._std
    return {'images': image, 'labels': np.int32(self._labels[index]), 'weights': np.float32(1)}


class Images(order.Rows):
  """Splits train and validation of one source.

  Every channel is standardised by its mean and deviation over the training split; there is no augmentation.

  Attributes:
    info: where the images are from, how many, mean and std. hash: identifies them. tokenizer: None.
  """

  tokenizer = None

  def __init__(self, name: str, splits: dict[str, tuple[np.ndarray, np.ndarray]]):
    train = splits['train'][0].astype(np.float64)
    mean, std = train.mean(axis=(0, 1, 2)), train.std(axis=(0, 1, 2))
    std = np.where(std > 0, std, 1.0)
    super().__init__(name, {s: Source(x, y, np.float32(mean), np.float32(std)) for s, (x, y) in splits.items()})
    self.info = {'source': name, 'mean': mean.tolist(), 'std': std.tolist(),
                 'splits': {s: len(x) for s, (x, _) in splits.items()}}
    digest = hashlib.sha256(json.dumps(self.info['splits']).encode())
    for images, labels in splits.values():
      digest.update(np.ascontiguousarray(images))
      digest.update(np.ascontiguousarray(labels.astype(np.int64)))
    self.hash = digest.hexdigest()


def open(data: DataConfig, model: ModelConfig) -> Images:
  """The images of `data.source`.

  A source without a validation split gives it data.validation_fraction of its images, always the same ones.

  Raises:
    UserError: there is no such source, or its images or labels are not those of the model.
  """
  path = pathlib.Path(data.source).expanduser()
  if data.source == 'digits':
    splits = _digits()
  elif path.suffix == '.npz' and path.is_file():
    splits = _npz(path)
  elif path.is_dir() and any(path.glob('train-images*')):
    splits = _idx(path)
  elif data.source == DataConfig.source:
    raise UserError(f'data.source must be given for a model of images; there are {SOURCES}.')
  else:
    raise UserError(f'data.source = {data.source!r} is no source of images; there are {SOURCES}.')
  splits = {s: _checked(data.source, *of, model) for s, of in splits.items()}
  if 'validation' not in splits:
    if len(splits['train'][0]) < 2:
      raise UserError(f'{data.source} has one image, and no second one to hold out; give it more.')
    splits = _hold_out(*splits['train'], data.validation_fraction)
  return Images(data.source, splits)


def _digits():
  try:
    from sklearn.datasets import load_digits
  except ImportError:
    raise UserError("data.source = digits needs scikit-learn: pip install 'lns_jax[vision]'.") from None
  found = load_digits()
  return {'train': (found.images.astype(np.uint8), found.target)}


def _npz(path: pathlib.Path):
  """Keys images and labels, with or without validation_images and validation_labels; or Keras' x_train, y_train..."""
  try:
    with np.load(path) as file:
      arrays = dict(file)
  except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error):
    # NumPy's own words are of pickles and zip files.
    raise UserError(f'{path} is damaged, or no .npz file of plain arrays; write it with numpy.savez.') from None
  for names in (('images', 'labels', 'validation_images', 'validation_labels'),
                ('x_train', 'y_train', 'x_test', 'y_test')):
    given = [n for n in names if n in arrays]
    if set(names[:2]) <= set(given):
      if len(given) == 3:
        raise UserError(f'{path} has {given[2]} alone: {names[2]} and {names[3]} belong together.')
      return {s: (arrays[x], arrays[y]) for s, x, y in zip(('train', 'validation'), given[::2], given[1::2])}
  raise UserError(f"{path} has {', '.join(arrays) or 'no arrays'}, but images and labels, or x_train and y_train, are "
                  'wanted.')


def _idx(folder: pathlib.Path):
  """The four files of MNIST and Fashion-MNIST, plain or .gz."""
  return {split: (_idx_file(folder, f'{prefix}-images-idx3-ubyte'), _idx_file(folder, f'{prefix}-labels-idx1-ubyte'))
          for split, prefix in (('train', 'train'), ('validation', 't10k'))}


def _idx_file(folder: pathlib.Path, name: str) -> np.ndarray:
  """Bytes in the shape that the header says: two zeros, 8 for bytes, the number of sizes, the sizes."""
  path = next((p for p in (folder / name, folder / f'{name}.gz') if p.is_file()), None)
  if path is None:
    raise UserError(f'{folder} has no {name} or {name}.gz.')
  try:
    content = gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
    zeros, kind, rank = struct.unpack_from('>HBB', content)
    shape = struct.unpack_from(f'>{rank}I', content, 4)
    if (zeros, kind) != (0, 8) or len(content) != 4 + 4 * rank + math.prod(shape):
      raise ValueError
  except (OSError, EOFError, ValueError, IndexError, struct.error, zlib.error):
    raise UserError(f'{path} is damaged, or no idx file of bytes.') from None
  return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def _hold_out(images, labels, fraction: float):
  order_of = np.random.default_rng(0).permutation(len(images))
  count = min(max(1, round(fraction * len(images))), len(images) - 1)
  pick = lambda ids: (images[ids], labels[ids])
  return {'train': pick(np.sort(order_of[count:])), 'validation': pick(np.sort(order_of[:count]))}


def _checked(name: str, images, labels, model: ModelConfig):
  """[N, S, S, C] and [N], or a refusal."""
  images = images[..., None] if images.ndim == 3 else images
  S, C = model.image_size, model.channels
  if images.ndim != 4 or images.shape[1:] != (S, S, C):
    raise UserError(f'{name} has images of shape {list(images.shape[1:])}, the model wants [{S}, {S}, {C}]: '
                    'set model.image_size and model.channels.')
  if not (np.issubdtype(images.dtype, np.integer) or np.issubdtype(images.dtype, np.floating)):
    raise UserError(f'{name} has images of type {images.dtype}; integers or floats are wanted.')
  if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
    raise UserError(f'{name} has {len(images)} images and labels of shape {list(labels.shape)} and type '
                    f'{labels.dtype}: one integer an image is wanted.')
  if len(labels) and not 0 <= labels.min() <= labels.max() < model.num_classes:
    raise UserError(f'{name} has labels from {labels.min()} to {labels.max()}, but model.num_classes is '
                    f'{model.num_classes}.')
  if not len(images):
    raise UserError(f'{name} has a split without images.')
  largest = np.max(np.abs(images.astype(np.float64)))
  if not largest < LARGEST:
    raise UserError(f'{name} has pixels of size {largest:g}; numbers below {LARGEST:g} are wanted.')
  return images, labels
