"""What `data.source` names: its parts, its splits and the hash of its content."""

import dataclasses
import pathlib

from lns_jax import files
from lns_jax.config import DataConfig
from lns_jax.data import embedded, file_source, found, hashing, tfds_source
from lns_jax.data.readers import Part, Slice


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
  return pathlib.Path(data.cache_dir).expanduser() if data.cache_dir else files.cache_folder()


def resolve(data: DataConfig) -> Source:
  """Finds what `data.source` names.

  Raises:
    UserError: if there is no such source, or it holds nothing that can be read.
  """
  if data.source == 'embedded':
    return _embedded(data)
  path = pathlib.Path(data.source).expanduser()
  if data.source.startswith('tfds:'):
    there = tfds_source.find(data.source.removeprefix('tfds:'), data.data_dir)
  elif (path / 'features.json').is_file():
    there = tfds_source.find_folder(path)
  else:
    there = file_source.find(path, data)
  digest = hashing.of_files(there.files, cache_folder(data) / 'file_hashes.json')
  rule = there.rule or f'documents whose hash is below {data.validation_fraction}'
  return Source(there.name, tuple(found.group(there.slices)), digest, rule, there.ignored)


def _embedded(data: DataConfig) -> Source:
  corpus = embedded.collect()
  folder = embedded.build(corpus, cache_folder(data) / f'embedded-text-{corpus.hash[:12]}')
  parts = []
  for split, documents, budget in (('train', corpus.train, 0),
                                   ('validation', corpus.validation, embedded.VALIDATION_TOKENS)):
    size = sum(len(text) for _, text in documents)
    parts.append(Part((Slice('tfds', str(folder), f'embedded:{split}', 0, len(documents), size),), split, budget))
  return Source('embedded', tuple(parts), corpus.hash, embedded.RULE)
