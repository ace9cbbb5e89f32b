"""Models that others have stored, as ours: one tensor at a time, each placed before the next is read."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from lns_jax.config import ModelConfig
from lns_jax.errors import UserError
from lns_jax.interop import families, names
from lns_jax.interop.fields import RECORD
from lns_jax.interop.weights import Weights
from lns_jax.models import by_layer

PAPERS = 'max_sequence_length'  # a field that only the paper's code writes, and nobody reads


def read(weights: Weights, *, scheme: str | None = None, dtype=None, sharding=None,
         known: Mapping[str, families.Family] = families.FAMILIES) -> tuple[ModelConfig, dict]:
  """(settings, parameters with one entry a layer).

  Args:
    weights: an opened folder or file.
    scheme: norm placement of weights that do not say theirs: those of the paper's code call themselves plain Llama.
    dtype: type that parameters are cast to; as stored by default.
    sharding: where they are placed: one for all, a tree, or a function of the settings that gives either; the default
      device by default.
    known: the families that the weights may be of, by model_type.

  Raises:
    UserError: a field of config.json is not understood; a tensor is missing, misshapen, not finite, or one that no
      part of the model stands for.
  """
  where = weights.path / 'config.json' if weights.path.is_dir() else weights.path
  family, settings = families.of(weights.config, where, known)
  if scheme is None and PAPERS in weights.config and RECORD not in weights.config:
    logging.warning("%s is one of the paper's code, which does not say where the norms' factors are: it is opened as "
                    'scheme %s; pass scheme=lns (import_hf.py --scheme=lns) for one trained with LayerNorm Scaling.',
                    where, settings.get('scheme', 'pre'))
  config = ModelConfig(**settings | ({} if scheme is None else {'scheme': scheme}))
  entries = names.table(config, family.rows)
  prefix = _prefix(weights, family)
  stored = {e.ours: _stored(e.theirs, prefix, family, weights) for e in entries}
  _check(weights, config, entries, stored, family)
  _check_tie(weights, config, stored, family)
  where = sharding(config) if callable(sharding) else sharding
  return config, _params(weights, config, entries, stored, dtype, where)


def _prefix(weights: Weights, family: families.Family) -> str:
  """What the names begin with, in place of the first of the family's prefixes."""
  usual, *others = family.prefixes
  return next((p for p in (usual, *others) if p and any(n.startswith(p) for n in weights.shapes)), others[-1])


def _stored(name: str, prefix: str, family: families.Family, weights: Weights) -> str:
  """What the file calls a tensor. Raises UserError for one that is there under two names and not twice the same."""
  usual = family.prefixes[0]
  name = prefix + name.removeprefix(usual) if name.startswith(usual) else name
  found = [n for n in (name, *(name.replace(*a) for a in family.aliases if a[0] in name)) if n in weights.shapes]
  for other in found[1:]:
    if not np.array_equal(weights.get(other), weights.get(found[0])):
      raise UserError(f'{weights.path}: {found[0]} and {other} are one tensor of the model, but they differ.')
  return found[0] if found else name


def _check(weights: Weights, config: ModelConfig, entries, stored: dict[str, str], family: families.Family):
  """Refuses missing, misshapen and unknown tensors, each by name."""
  shapes = names.shapes(config)
  parts = {stored[e.ours]: e.whole(shapes[e.ours], config) for e in entries}
  for name, wanted in parts.items():
    if name not in weights.shapes:
      raise UserError(f'{weights.path} has no tensor {name}, which its config.json asks for.')
    if weights.shapes[name] != wanted:
      raise UserError(f'{weights.path}: tensor {name} has shape {list(weights.shapes[name])}, where config.json asks '
                      f'for {list(wanted)}.')
  tied = (family.tied,) if config.tie_embeddings else ()
  again = [n.replace(*a) for n in parts for a in family.aliases if a[0] in n]
  others = [n for n in weights.shapes if n not in (*parts, *tied, *again)]
  some_of = lambda names: [n for n in others if any(n.endswith(e) or f'{e}.' in n for e in names)]
  extra = sorted({*others} - {*some_of(family.extras), *some_of(family.unused)})
  if extra:
    more = f' and {len(extra) - 1} more' if extra[1:] else ''
    raise UserError(f'{weights.path} has a tensor {extra[0]}{more} that no part of a {weights.config["model_type"]} '
                    'stands for.')
  if unused := sorted(some_of(family.unused)):
    logging.warning('%s: %s of no use here and left out.', weights.path,
                    f"{', '.join(unused)} {'are' if unused[1:] else 'is'}")


def _check_tie(weights: Weights, config: ModelConfig, stored: dict[str, str], family: families.Family):
  """Refuses a head of its own in a model whose config says that the embedding is the head."""
  if not config.tie_embeddings or family.tied not in weights.shapes:
    return
  if not np.array_equal(weights.get(family.tied), weights.get(stored['embed/table'])):
    raise UserError(f'{weights.path}: config.json says tie_word_embeddings, but {family.tied} is not the embedding; '
                    'set it to false to use the head.')


def _params(weights: Weights, config: ModelConfig, entries, stored: dict[str, str], dtype, sharding) -> dict:
  """The tree, each leaf cast and placed as soon as it is read."""
  placed = {}
  places = None if sharding is None or isinstance(sharding, jax.sharding.Sharding) else dict(by_layer.leaves(sharding))
  by_tensor = {}
  for e in entries:
    by_tensor.setdefault(stored[e.ours], []).append(e)
  for name, of_tensor in by_tensor.items():
    tensor = weights.get(name)
    for e in of_tensor:
      leaf = e.read(tensor, config)
      with np.errstate(over='ignore'):  # what does not fit is refused below
        leaf = np.ascontiguousarray(leaf if dtype is None else leaf.astype(jnp.dtype(dtype)))
      placed[e.ours] = jax.device_put(leaf, sharding if places is None else places[e.ours]).block_until_ready()
      if not _all_finite(placed[e.ours]):
        raise UserError(f'{weights.path}: tensor {name} holds NaN or infinity, as {leaf.dtype}; the model is damaged, '
                        'or its numbers do not fit that type.')
  return names.nested(placed)


@jax.jit  # one program a shape, which needs no memory of the tensor's size
def _all_finite(x: jax.Array) -> jax.Array:
  return jnp.all(jnp.isfinite(x))
