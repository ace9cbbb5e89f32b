"""Opening a Qwen2.5-VL from a Hugging Face folder: a vision tower and a decoder."""

import json
import re

import numpy as np

from lns_jax import files
from lns_jax.data import tokenizers
from lns_jax.data.pictures import Processor
from lns_jax.errors import UserError
from lns_jax.interop import hf, vl_families, weights
from lns_jax.models import layout, vl

# How names begin: those of the decoder and of the tower, in files of 2025 and in newer ones -> in `vl_families`.
PARTS = {'text': (r'model\.language_model\.(.*)|model\.(?!visual\.)(.*)|()lm_head\..*', 'model.'),
         'vision': (r'(?:model\.)?visual\.(.*)', 'visual.')}


class Part(weights.Weights):
  """The tensors of one tower under the names that they have in `vl_families`.

  theirs: {that name: the name in the files}.
  """

  def __init__(self, of: weights.Weights, name: str, config: dict):
    """of: the whole model. name: 'text' or 'vision'. config: the tower's fields."""
    self.path, self.config, self.theirs, self._of = of.path, config, {}, of
    pattern, begin = PARTS[name]
    for theirs in of.shapes:
      if match := re.fullmatch(pattern, theirs):
        rest = next(group for group in match.groups() if group is not None)
        self.theirs[begin + rest if rest else theirs] = theirs
    self.shapes = {ours: of.shapes[theirs] for ours, theirs in self.theirs.items()}

  def get(self, name: str) -> np.ndarray:
    return self._of.get(self.theirs[name])

  def tokenizer(self) -> tokenizers.Tokenizer | None:
    return self._of.tokenizer()


def load(path, *, dtype=None, sharding=None) -> tuple[vl.VLConfig, dict, tokenizers.Tokenizer | None]:
  """Opens a Qwen2.5-VL.

  Args:
    path: Hugging Face folder, with the tensors' names of 2025 ('visual.', 'model.') or newer ones.
    dtype: type that the parameters are cast to; as stored by default.
    sharding: where they are placed, one for all; the default device by default.

  Returns:
    (VLConfig, {'vision': parameters, 'text': parameters}, tokenizer; None where there is none).

  Raises:
    UserError: it is none, a field of config.json is not understood, or a tensor is missing, misshapen or not known.
  """
  opened = weights.open(path)
  settings, *of_parts = vl_families.split(opened.config, opened.path / 'config.json')
  parts = {name: Part(opened, name, fields) for name, fields in zip(('text', 'vision'), of_parts)}
  unknown = sorted(set(opened.shapes) - {theirs for part in parts.values() for theirs in part.theirs.values()})
  if unknown:
    raise UserError(f'{opened.path} has a tensor {unknown[0]} that no part of a Qwen2.5-VL stands for.')
  configs, params = {}, {}
  for name, part in parts.items():
    configs[name], read = hf.read(part, dtype=dtype, sharding=sharding, known=vl_families.FAMILIES)
    params[name] = layout.native(read, configs[name])
  config, tokenizer = vl.VLConfig(**settings, **configs), opened.tokenizer()
  if tokenizer is not None:
    tokenizers.check_vocab(tokenizer, config.text.vocab_size)
  return config, params, tokenizer


def processor(path, config: vl.VLConfig, *, max_pixels: int | None = None) -> Processor:
  """How pictures become patches: as preprocessor_config.json of the folder says, if there is one.

  max_pixels: another bound on the pixels of a picture.

  Raises UserError for a preprocessor that does something else, or makes other patches than the tower reads.
  """
  file = files.absolute(path) / 'preprocessor_config.json'
  given = weights.read_json(file) if file.exists() else {}
  size = given.get('size') or {}
  for name, wanted in (('do_resize', True), ('do_rescale', True), ('do_normalize', True), ('do_convert_rgb', True),
                       ('resample', 3)):
    if given.get(name, wanted) not in (wanted, None):
      raise UserError(f'{file}: {name} = {given[name]!r} is not supported, it must be {json.dumps(wanted)}.')
  if not np.isclose(given.get('rescale_factor') or 1 / 255, 1 / 255):
    raise UserError(f'{file}: rescale_factor = {given["rescale_factor"]!r} is not supported, it must be 1 / 255.')
  names = {'patch_size': 'patch_size', 'temporal_patch_size': 'frames', 'merge_size': 'merge'}
  for theirs, ours in names.items():
    wanted = getattr(config.vision, ours)
    if given.get(theirs, wanted) != wanted:
      raise UserError(f'{file}: {theirs} = {given[theirs]} is not the {wanted} of the vision tower.')
  default = Processor()
  return Processor(
      patch_size=config.vision.patch_size, frames=config.vision.frames, merge=config.vision.merge,
      min_pixels=given.get('min_pixels') or size.get('shortest_edge') or default.min_pixels,
      max_pixels=max_pixels or given.get('max_pixels') or size.get('longest_edge') or default.max_pixels,
      mean=tuple(given.get('image_mean') or default.mean), std=tuple(given.get('image_std') or default.std))
