"""Where the patches of an image and the tokens of a text with images stand (Qwen2.5-VL): plain numpy, on the host.

An image is a grid (1, h, w) of patches; cells are squares of merge x merge patches, each one token of the text. Patches
are in merge order: those of a cell follow each other, cells in rows.
"""

import numpy as np

from lns_jax.errors import UserError


def check(grid_thw: np.ndarray, merge: int):
  """Refuses grids [N, 3] that are not those of images that divide into cells."""
  for n, (t, h, w) in enumerate(grid_thw):
    if t != 1:
      raise UserError(f'image {n} has a grid of {t} frames; videos are not supported, an image has one.')
    if h < 1 or w < 1 or h % merge or w % merge:
      raise UserError(f'image {n} has a grid of {h} x {w} patches, which does not divide into cells of {merge} x '
                      f'{merge}; {-(-max(h, 1) // merge) * merge} x {-(-max(w, 1) // merge) * merge} would.')


def in_merge_order(values_hw: np.ndarray, merge: int) -> np.ndarray:
  """[h, w, ...] -> [h * w, ...]."""
  h, w, *rest = values_hw.shape
  return values_hw.reshape(h // merge, merge, w // merge, merge, *rest).swapaxes(1, 2).reshape(h * w, *rest)


def patch_coordinates(h: int, w: int, merge: int) -> np.ndarray:
  """[h * w, 2] int32: row and column of each patch."""
  return in_merge_order(np.stack(np.indices((h, w)), axis=-1), merge).astype(np.int32)


def patch_windows(h: int, w: int, merge: int, cells: int) -> np.ndarray:
  """[h * w] int32: the window of each patch, from 1; windows are cells x cells cells, less at the right and below."""
  rows, columns = np.indices((h, w)) // (merge * cells)
  return in_merge_order(1 + rows * (-(-w // (merge * cells))) + columns, merge).astype(np.int32)


def text_coordinates(tokens: np.ndarray, segment_ids: np.ndarray, image_id: int, grids: list, merge: int,
                     row: int) -> np.ndarray:
  """[T, 3] int32: time, row and column of each token of a row (M-RoPE, arXiv 2409.12191 section 2.1).

  Text counts on in all three at once. The cells of an image have one time, and rows and columns that start there; the
  text behind goes on after the largest of them. Each segment starts at 0; padding has 0.

  Args:
    tokens, segment_ids: [T]. grids: (h, w) patches of the images that the row shows, in order.
    row: number of the row, for messages.

  Raises:
    UserError: a run of image tokens is not as long as its image has cells, or the row has more or fewer images.
  """
  found = np.zeros((len(tokens), 3), np.int32)
  left, here, at = list(grids), 0, 0
  while at < len(tokens):
    if at and segment_ids[at] != segment_ids[at - 1]:
      here = 0
    if not segment_ids[at]:
      at += 1
    elif tokens[at] != image_id:
      found[at] = here
      here, at = here + 1, at + 1
    else:
      h, w = (n // merge for n in left.pop(0)) if left else (0, 0)
      shown = tokens[at:at + h * w]
      if not h or len(shown) < h * w or (shown != image_id).any():
        raise UserError(f'row {row} has image tokens at {at} that do not fit its images: there the next image has '
                        f'{h * w} cells, and as many tokens {image_id} must stand there.')
      found[at:at + h * w] = here + np.concatenate([np.zeros((h * w, 1), int), np.indices((h, w)).reshape(2, -1).T], 1)
      here, at = here + max(h, w), at + h * w
  if left:
    raise UserError(f'row {row} has tokens for {len(grids) - len(left)} images, but there are {len(grids)}.')
  return found
