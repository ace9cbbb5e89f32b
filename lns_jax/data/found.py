"""What looking at a source finds, and how it is divided into parts."""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator

from lns_jax.data.readers import Part, Slice

# A part is at most about this large where a source can be divided.
PART_BYTES = 32 << 20

_SPLIT_NAME = re.compile(r'(?<![a-z])(train|training|validation|valid|val|test)(?![a-z])')
_SPLITS = {'train': 'train', 'training': 'train', 'validation': 'validation', 'valid': 'validation',
           'val': 'validation', 'test': 'test'}


@dataclasses.dataclass(frozen=True)
class Found:
  """A source as it lies on disk.

  Attributes:
    name: short, for folder names and people.
    slices: (split, slice) in the order of the data; split 'train', 'validation' or '' (by hash).
    files: (name, path) of all that was found, for the hash of the content.
    rule: what makes the validation split; empty: the hash of a document's id.
    ignored: names of files or splits that are not read.
  """

  name: str
  slices: tuple[tuple[str, Slice], ...]
  files: tuple[tuple[str, pathlib.Path], ...]
  rule: str = ''
  ignored: tuple[str, ...] = ()


def split_named(name: str) -> str:
  """The split that a file's or a split's name says, the last word of it deciding; '' if it says none."""
  words = _SPLIT_NAME.findall(name.lower())
  return _SPLITS[words[-1]] if words else ''


def splits_of(names: Iterable[str]) -> dict[str, str] | None:
  """Split of each name where one of them says `validation`: the others train, `test` ('') is left out.

  None: no name says validation, so that documents are split by hash (and `test` is a name like others).
  """
  said = {name: split_named(name) for name in names}
  if 'validation' not in said.values():
    return None
  return {name: '' if split == 'test' else split or 'train' for name, split in said.items()}


def group(slices: Iterable[tuple[str, Slice]]) -> Iterator[Part]:
  """Consecutive slices of one split and kind as parts of about `PART_BYTES`."""
  held: list[Slice] = []
  last, size = ('', ''), 0
  for split, piece in slices:
    key = (split, piece.kind)
    if held and (key != last or size + piece.size > PART_BYTES):
      yield Part(tuple(held), last[0])
      held, size = [], 0
    held.append(piece)
    last, size = key, size + piece.size
  if held:
    yield Part(tuple(held), last[0])
