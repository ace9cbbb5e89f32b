"""Qwen2.5-VL (arXiv 2502.13923): a vision tower whose embeddings take the places of a decoder's image tokens.

Both towers are ordinary models: `transformer`, and the measures of `lns_jax.depth`, work on (config.vision,
params['vision'], batch['vision']) and on (config.text, params['text'], text_batch(config, params, batch)).
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.errors import UserError, nearest
from lns_jax.models import grids, transformer
from lns_jax.settings import Section, setting

TOWERS = ('vision', 'text')


@dataclasses.dataclass(frozen=True)
class VLConfig(Section):
  """A vision tower, a decoder, and the tokens by which a text shows images."""

  NAME = 'vl'
  text: ModelConfig
  vision: ModelConfig
  image_id: int = setting(151655, 'Token that stands for a cell of an image.', low=0)
  video_id: int = setting(151656, 'Token that would stand for a cell of a video.', low=0)
  start_id: int = setting(151652, 'Token before the cells of an image.', low=0)
  end_id: int = setting(151653, 'Token behind them.', low=0)

  def check(self):
    for name, family in zip(TOWERS, ('tower', 'decoder')):
      if getattr(self, name).family != family:
        raise UserError(f'vl.{name} must be a model of family {family}, got {getattr(self, name).family}.')
    if self.vision.out_width != self.text.d_model:
      raise UserError(f'vl.vision.out_width = {self.vision.out_width} must be vl.text.d_model = {self.text.d_model}.')


def init(config: VLConfig, rng: jax.Array):
  """Fresh parameters: {'vision': ..., 'text': ...}."""
  keys = jax.random.split(rng)
  return {name: transformer.init(getattr(config, name), key) for name, key in zip(TOWERS, keys)}


def arrange(config: VLConfig, tokens: np.ndarray, patches: np.ndarray, grid_thw: np.ndarray, *,
            segment_ids: np.ndarray | None = None, most_patches: int = 0) -> dict:
  """What `forward` reads, from what a processor makes. On the host.

  Args:
    tokens: [B, T], with one image token for each cell.
    patches: [sum of h * w, C * frames * P * P]: those of all images in the order of the text, in merge order.
    grid_thw: [N, 3]: (1, h, w) of each image, in patches.
    segment_ids: [B, T], 0 is padding; None: one document a row.
    most_patches: length of the tower's rows; 0: that of the longest image.

  Returns:
    'tokens', 'segment_ids' [B, T]; 'coordinates' [B, T, 3]; 'slots' [N, cells]: the place in [B * T] of each cell, and
    B * T of padding; 'vision': the tower's batch, a row an image. All int32, patches float32.

  Raises:
    UserError: tokens and images do not fit, or there are videos.
  """
  tokens = np.asarray(tokens, np.int32)
  segment_ids = np.ones_like(tokens) if segment_ids is None else np.asarray(segment_ids, np.int32)
  grid_thw, merge = np.asarray(grid_thw, int).reshape(-1, 3), config.vision.merge
  grids.check(grid_thw, merge)
  seen = (tokens == config.image_id) & (segment_ids > 0)
  if ((tokens == config.video_id) & (segment_ids > 0)).any():
    raise UserError(f'token {config.video_id} stands for a video; videos are not supported.')
  cells = grid_thw[:, 1] * grid_thw[:, 2] // merge ** 2
  ends = np.cumsum(np.concatenate([[0], cells]))
  if len(patches) != ends[-1] * merge ** 2 or np.sum(seen) != ends[-1]:
    raise UserError(f'{len(patches)} patches and {np.sum(seen)} image tokens do not fit {len(grid_thw)} images, which '
                    f'have {ends[-1] * merge ** 2} patches in {ends[-1]} cells.')
  first = np.searchsorted(ends, np.cumsum(np.concatenate([[0], seen.sum(axis=1)])))  # image of each row
  sides = grid_thw[:, 1:].tolist()
  coordinates = [grids.text_coordinates(tokens[b], segment_ids[b], config.image_id, sides[first[b]:first[b + 1]], merge,
                                        row=b) for b in range(len(tokens))]
  longest = max(most_patches, max(cells, default=0) * merge ** 2)
  slots = np.full((len(cells), longest // merge ** 2), tokens.size, np.int32)
  for n, places in enumerate(np.split(np.flatnonzero(seen), ends[1:-1])[:len(cells)]):
    slots[n, :len(places)] = places
  return {'tokens': tokens, 'segment_ids': segment_ids, 'coordinates': np.stack(coordinates), 'slots': slots,
          'vision': _tower_batch(config.vision, patches, grid_thw, longest)}


def _tower_batch(config: ModelConfig, patches: np.ndarray, grid_thw: np.ndarray, longest: int) -> dict:
  """A row an image, padded to `longest` patches."""
  cells = config.window_size // (config.patch_size * config.merge)
  rows = {'patches': [], 'coordinates': [], 'segment_ids': [], 'windows': []}
  at = 0
  for _, h, w in grid_thw.tolist():
    one = np.ones(h * w, np.int32)
    rows['patches'].append(np.asarray(patches[at:at + h * w], np.float32))
    rows['coordinates'].append(grids.patch_coordinates(h, w, config.merge))
    rows['segment_ids'].append(one)
    rows['windows'].append(grids.patch_windows(h, w, config.merge, cells) if cells else one)
    at += h * w
  pad = lambda v: np.pad(v, [(0, longest - len(v))] + [(0, 0)] * (v.ndim - 1))
  return {name: np.stack([pad(v) for v in values]) for name, values in rows.items() if values}


def image_embeddings(config: VLConfig, params, vision_batch: Mapping[str, jax.Array]) -> jax.Array:
  """The tower's output [N, cells, D of the decoder]."""
  return transformer.apply(config.vision, params['vision'], vision_batch)[0]


def text_batch(config: VLConfig, params, batch: Mapping) -> dict:
  """The decoder's batch: embeddings [B, T, D] with the images' in their places as 'tokens', and all else but images."""
  x_BTD = params['text']['embed']['table'][batch['tokens']]
  if 'patches' in batch['vision']:
    x_BTD = placed(x_BTD, image_embeddings(config, params, batch['vision']), batch['slots'])
  return {k: v for k, v in batch.items() if k not in ('vision', 'slots')} | {'tokens': x_BTD}


def placed(x_BTD: jax.Array, images: jax.Array, slots: jax.Array) -> jax.Array:
  """x_BTD with the embeddings [N, cells, D] at `slots` [N, cells]; those behind the last place are left out."""
  flat = x_BTD.reshape(-1, x_BTD.shape[-1])
  images = images.reshape(-1, images.shape[-1]).astype(x_BTD.dtype)
  return flat.at[slots.reshape(-1)].set(images, mode='drop').reshape(x_BTD.shape)


def forward(config: VLConfig, params, batch: Mapping) -> jax.Array:
  """batch of `arrange` -> logits [B, T, V] float32."""
  text = text_batch(config, params, batch)
  return transformer.apply(config.text, params['text'], text)[0]


def states(config: VLConfig, params, batch: Mapping) -> dict[str, jax.Array]:
  """The residual streams of both towers, as of `transformer.states`.

  Returns {'vision': [L+1, N, patches, D], 'text': [L+1, B, T, D], the images' embeddings in their places}.
  """
  found = {}
  for name, of in (('vision', batch['vision']), ('text', text_batch(config, params, batch))):
    tower = getattr(config, name)
    found[name] = transformer.states(tower, params[name], transformer.inputs(tower, of), **transformer.placement(of))
  return found


def remove_layers(config: VLConfig, params, tower: str, ids):
  """The model without layers `ids` of one tower, 'vision' or 'text'; see `transformer.remove_layers`.

  Returns (config, params). Raises UserError for an unknown tower, or as `transformer.remove_layers`.
  """
  if tower not in TOWERS:
    raise UserError(f'there is no tower {tower!r}.{nearest(tower, TOWERS)}')
  less, left = transformer.remove_layers(getattr(config, tower), params[tower], ids)
  return dataclasses.replace(config, **{tower: less}), {**params, tower: left}
