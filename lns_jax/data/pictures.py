"""Pictures as the patches that Qwen2.5-VL reads: what Hugging Face's Qwen2VLImageProcessor computes with PIL.

A picture becomes RGB, is resized (bicubic) to multiples of patch_size * merge within bounds on its pixels, and its
numbers are standardised by the mean and the deviation of CLIP's training set.
"""

import dataclasses
import math
import pathlib

import numpy as np
from PIL import Image, ImageOps

from lns_jax.errors import UserError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MOST_ASPECT = 200  # longer side over shorter, as in the original


@dataclasses.dataclass(frozen=True)
class Processor:
  """The settings of preprocessor_config.json.

  Attributes:
    patch_size: height and width of a patch. frames: times that a picture is repeated in one. merge: side of a cell.
    min_pixels, max_pixels: bounds on height * width after resizing.
    mean, std: of red, green and blue, which are in 0..1.
  """

  patch_size: int = 14
  frames: int = 2
  merge: int = 2
  min_pixels: int = 56 * 56
  max_pixels: int = 28 * 28 * 1280
  mean: tuple[float, float, float] = CLIP_MEAN
  std: tuple[float, float, float] = CLIP_STD

  def __post_init__(self):
    if self.min_pixels > self.max_pixels or self.max_pixels < (self.patch_size * self.merge) ** 2:
      cell = self.patch_size * self.merge
      raise UserError(f'pictures of {self.min_pixels} to {self.max_pixels} pixels: there are none, or they do not hold '
                      f'a cell of {cell} x {cell}.')

  def size(self, height: int, width: int) -> tuple[int, int]:
    """(height, width) after resizing: multiples of a cell, within the bounds, in about the same proportion."""
    if max(height, width) > MOST_ASPECT * min(height, width):
      raise UserError(f'a picture of {height} x {width} pixels is too narrow: one side may be {MOST_ASPECT} times the '
                      'other at most.')
    cell = self.patch_size * self.merge
    h, w = round(height / cell) * cell, round(width / cell) * cell
    if h * w > self.max_pixels:
      shrink = math.sqrt(height * width / self.max_pixels)
      return tuple(max(cell, math.floor(side / shrink / cell) * cell) for side in (height, width))
    if h * w < self.min_pixels:
      grow = math.sqrt(self.min_pixels / (height * width))
      return tuple(math.ceil(side * grow / cell) * cell for side in (height, width))
    return h, w

  def cells(self, height: int, width: int) -> int:
    """Tokens that a picture of this size takes in a text."""
    h, w = self.size(height, width)
    return h * w // (self.patch_size * self.merge) ** 2

  def patches(self, picture) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches of one picture.

    Args:
      picture: path, PIL image, or uint8 [height, width, 3], or [height, width] of a grey one.

    Returns:
      ([h * w, 3 * frames * P * P] float32, in merge order; (1, h, w)).

    Raises:
      UserError: there is no picture at the path, or it is too narrow.
    """
    image = opened(picture)
    h, w = self.size(image.height, image.width)
    image = image.resize((w, h), resample=3)  # bicubic
    rgb = np.asarray(image, np.float32) * np.float32(1 / 255)
    rgb = (rgb - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
    P, m = self.patch_size, self.merge
    x = rgb.reshape(h // (P * m), m, P, w // (P * m), m, P, 3)
    x = x.transpose(0, 3, 1, 4, 6, 2, 5)  # row and column of the cell, those in it, channel, those in the patch
    x = np.repeat(x[:, :, :, :, :, None], self.frames, axis=5)
    return x.reshape(-1, 3 * self.frames * P * P), (1, h // P, w // P)


def opened(picture) -> Image.Image:
  """A path, array or PIL image as a PIL image in RGB, turned as its file says. Raises UserError for what is none."""
  if isinstance(picture, np.ndarray):
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (3,)):
      raise UserError(f'a picture must be uint8 [height, width, 3] or [height, width], got {picture.dtype} '
                      f'{list(picture.shape)}.')
    return Image.fromarray(picture).convert('RGB')
  if isinstance(picture, Image.Image):
    return picture.convert('RGB')
  path = pathlib.Path(picture).expanduser()
  try:
    with Image.open(path) as image:
      return ImageOps.exif_transpose(image).convert('RGB')
  except FileNotFoundError:
    raise UserError(f'there is no picture at {path}.') from None
  except (OSError, SyntaxError, Image.DecompressionBombError) as e:
    raise UserError(f'{path} is no picture that can be read: {e}.') from None
