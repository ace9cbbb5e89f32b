"""What `data.source` names: its parts, its splits and the hash of its content."""

import dataclasses
import hashlib
import json
import os
import pathlib

from lns_jax.config import DataConfig
from lns_jax.data import embedded
from lns_jax.data.readers import Part
from lns_jax.errors import UserError

# A part is at most about this large where a file can be divided; a part is the unit of work and of resuming.
PART_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Source:
  """A resolved source.

  Attributes:
    name: short, for folder names and people. parts: in the order of the data.
    hash: sha256 (hex) of the content. validation: the rule that makes the validation split, for people.
    ignored: names of files that were not read.
  """

  name: str
  parts: tuple[Part, ...]
  hash: str
  validation: str
  ignored: tuple[str, ...] = ()


def cache_folder(data: DataConfig) -> pathlib.Path:
  """data.cache_dir, else $LNS_JAX_CACHE, else the user's cache folder."""
  given = data.cache_dir or os.environ.get('LNS_JAX_CACHE')
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(given).expanduser() if given else pathlib.Path(base) / 'lns_jax'


def resolve(data: DataConfig) -> Source:
  """Finds what `data.source` names.

  Raises:
    UserError: if there is no such source, or it holds nothing that can be read.
  """
  if data.source == 'embedded':
    return _embedded(data)
  raise UserError(f'data.source = {data.source!r} is not known.')


def _embedded(data: DataConfig) -> Source:
  corpus = embedded.collect()
  folder = embedded.build(corpus, cache_folder(data) / f'embedded-text-{corpus.hash[:12]}')
  parts = []
  for split, documents, budget in (('train', corpus.train, 0),
                                   ('validation', corpus.validation, embedded.VALIDATION_TOKENS)):
    size = sum(len(text) for _, text in documents)
    parts.append(Part('tfds', str(folder), f'embedded:{split}', split, 0, len(documents), size, budget))
  rule = f'files of a reserved {embedded.VALIDATION_BYTES} bytes up to {embedded.VALIDATION_TOKENS} tokens'
  return Source('embedded', tuple(parts), corpus.hash, rule)
