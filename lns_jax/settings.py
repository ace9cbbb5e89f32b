"""What a setting is: a field of a frozen dataclass with its meaning and bounds, which checks itself."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from lns_jax.errors import UserError, nearest


def setting(default, doc: str, *, low=None, above=None, high=None, below=None, choices=None, refused=None,
            family=None, scheme=None):
  """A dataclass field with its meaning and bounds (low, high inclusive; above, below exclusive).

  refused: {name: why it is no choice, the rest of a sentence} of those that somebody may well look for.
  family: the only model family that has it, or several; another one refuses to have it set.
  scheme: the only scheme that reads it; with another one a run says so.
  """
  doc = f'{scheme}: {doc}' if scheme else doc
  family = (family,) if isinstance(family, str) else family or ()
  bounds = {'low': low, 'above': above, 'high': high, 'below': below, 'choices': choices, 'refused': refused or {}}
  return dataclasses.field(default=default, metadata={'doc': doc, 'family': family, 'scheme': scheme, **bounds})


_BOUNDS = {
    'low': (lambda v, b: v >= b, 'at least'),
    'above': (lambda v, b: v > b, 'above'),
    'high': (lambda v, b: v <= b, 'at most'),
    'below': (lambda v, b: v < b, 'below'),
}


def _check_type(where: str, value, kind):
  """Returns the value as `kind` (int to float, list to tuple), or raises."""
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if typing.get_origin(kind) is tuple:
    element = typing.get_args(kind)[0]
    if not isinstance(value, (tuple, list)):
      raise UserError(f'{where} must be a tuple of {element.__name__}, got {value!r}.')
    return tuple(_check_type(where, v, element) for v in value)
  if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
    raise UserError(f'{where} must be of type {kind.__name__}, got {value!r}.')
  if kind is float and not math.isfinite(value):
    raise UserError(f'{where} must be a finite number, got {value!r}.')
  return value


class Section:
  """Base of all settings classes: checks every field against its declared type and bounds."""

  NAME = ''

  def __post_init__(self):
    for f in dataclasses.fields(self):
      where = f'{self.NAME}.{f.name}'.lstrip('.')
      value = getattr(self, f.name)
      if isinstance(value, Section):
        continue
      value = _check_type(where, value, f.type)
      self.fill(**{f.name: value})
      choices = f.metadata.get('choices')
      if choices is not None:
        value = value.lower()  # `LNS` must never select anything but lns (paper.md 6.1)
        if value in f.metadata['refused']:
          raise UserError(f"{where} = {value} {f.metadata['refused'][value]}")
        if value not in choices:
          raise UserError(f'{where} = {value!r} is not known.{nearest(value, choices)}')
        self.fill(**{f.name: value})
      for bound, (holds, words) in _BOUNDS.items():
        limit = f.metadata.get(bound)
        if limit is not None and not holds(value, limit):
          raise UserError(f'{where} must be {words} {limit}, got {value!r}.')
    self.check()

  def check(self):
    """Checks that need more than one field; may fill in derived fields."""

  def refuse_foreign(self, family: str):
    """Refuses a setting that only another model family has, naming those that this one has alone."""
    fields = dataclasses.fields(self)
    for f in fields:
      owners, value = f.metadata['family'], getattr(self, f.name)
      if owners and family not in owners and value != f.default:
        own = ', '.join(g.name for g in fields if family in g.metadata['family'])
        own = f'{own} and those that the families share' if own else 'those that the families share'
        raise UserError(f"{self.NAME}.{f.name} = {value!r} belongs to model.family = {' or '.join(owners)}; with "
                        f'model.family = {family} the settings of {self.NAME} are {own}.')

  def fill(self, **derived):
    """Sets derived values of a frozen section."""
    for name, value in derived.items():
      object.__setattr__(self, name, value)


def from_dict(cls, values: Mapping[str, Any], where: str = ''):
  """Builds a settings class from nested mappings; unknown keys are refused with the nearest right name."""
  fields = {f.name: f for f in dataclasses.fields(cls)}
  built = {}
  for key, value in values.items():
    if key not in fields:
      raise UserError(f'config has no setting {where}{key!s}.{nearest(key, fields)}')
    kind = fields[key].type
    if isinstance(kind, type) and issubclass(kind, Section):
      if not isinstance(value, Mapping):
        raise UserError(f'config setting {where}{key} must be a group of settings, got {value!r}.')
      value = from_dict(kind, value, f'{where}{key}.')
    built[key] = value
  return cls(**built)


def to_dict(config: Section) -> dict[str, Any]:
  """The inverse of `from_dict`: nested plain dicts, tuples as lists, ready for JSON."""
  def plain(v):
    return {k: plain(w) for k, w in v.items()} if isinstance(v, dict) else list(v) if isinstance(v, tuple) else v
  return plain(dataclasses.asdict(config))


def declared(cls) -> dict[str, Any]:
  """Declared defaults of a settings class and its groups, before derived values are filled in."""
  return {f.name: declared(f.type) if isinstance(f.type, type) and issubclass(f.type, Section) else f.default
          for f in dataclasses.fields(cls)}
