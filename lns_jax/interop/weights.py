"""Weights of a model as others store them, read one tensor at a time, under Hugging Face's names."""

import abc
import os
import pathlib

import numpy as np

from lns_jax import files
from lns_jax.data import tokenizers
from lns_jax.errors import UserError

INDEX = 'model.safetensors.index.json'
WHOLE = 'model.safetensors'
FLOATS = ('F64', 'F32', 'F16', 'BF16')  # types of weights; whole numbers and 8 bits have scales somewhere else
PICKLES = ('*.bin', '*.pt', '*.pth', '*.ckpt')


class Weights(abc.ABC):
  """What the import knows of a stored model.

  Attributes:
    path: of the folder or file.
    config: config.json as parsed, or the same fields from another format's metadata.
    shapes: {tensor name: shape}.
  """

  path: pathlib.Path
  config: dict
  shapes: dict[str, tuple[int, ...]]

  @abc.abstractmethod
  def get(self, name: str) -> np.ndarray:
    """Reads one tensor, in the type that it is stored in."""

  @abc.abstractmethod
  def tokenizer(self) -> tokenizers.Tokenizer | None:
    """The tokenizer that lies beside the weights; None where there is none."""


class FolderWeights(Weights):
  """A Hugging Face folder: config.json, and safetensors in one file or in shards with an index."""

  def __init__(self, path: pathlib.Path):
    """Raises UserError when config.json, a shard or a name of the index is missing, or a file is damaged."""
    self.path, self.config = path, files.read_json(path / 'config.json')
    self._files = {}
    for file, wanted in _files(path).items():
      opened = _open(file)
      names = set(opened.keys()) if wanted is None else wanted
      absent = sorted(names - set(opened.keys()))
      if absent:
        raise UserError(f'{file} does not hold {absent[0]}, which {INDEX} says it does.')
      self._files |= dict.fromkeys(names, opened)
    self.shapes = {name: tuple(f.get_slice(name).get_shape()) for name, f in self._files.items()}

  def get(self, name: str) -> np.ndarray:
    kind = self._files[name].get_slice(name).get_dtype()
    if kind not in FLOATS:
      raise UserError(f'{self.path}: tensor {name} is of type {kind}, which is no weight as it stands; give the folder '
                      f'with the weights as they were before, of type {", ".join(FLOATS)}.')
    return self._files[name].get_tensor(name)

  def tokenizer(self) -> tokenizers.Tokenizer | None:
    return tokenizers.load(self.path) if tokenizers.is_in(self.path) else None


def _files(path: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
  """{file: the tensors that the index says are in it, None: all}."""
  if (path / INDEX).exists():
    return indexed(path / INDEX)
  if (path / WHOLE).is_file():
    return {path / WHOLE: None}
  pickles = sorted(f.name for pattern in PICKLES for f in path.glob(pattern))
  if pickles:
    raise UserError(f'{path} holds {pickles[0]}, a pickle, which can run code and is not opened; '
                    f'import_hf.py --from_bin={path} --out=FOLDER writes it as safetensors.')
  raise UserError(f'{path} holds neither {WHOLE} nor {INDEX}.')


def indexed(index: pathlib.Path) -> dict[pathlib.Path, set[str]]:
  """{file: names of its tensors} of an index. Raises UserError for a file that is not there or not beside the index."""
  where, found = files.read_json(index).get('weight_map'), {}
  if not isinstance(where, dict) or not where:
    raise UserError(f'{index} names no tensor.')
  for name, file in where.items():
    if pathlib.PurePath(str(file)).name != file:
      raise UserError(f'{index} names {file!r}, which is no file of its own folder.')
    found.setdefault(index.with_name(file), set()).add(name)
  missing = [file.name for file in found if not os.path.isfile(file)]  # of what is no name at all, too
  if missing:
    raise UserError(f'{index} names {missing[0]}, which is not there.')
  return found


def _open(file: pathlib.Path):
  try:
    import safetensors
  except ImportError:
    raise UserError("Hugging Face folders need the package safetensors: pip install 'lns_jax[hf]'.") from None
  try:
    return safetensors.safe_open(file, 'numpy')
  except (OSError, safetensors.SafetensorError) as e:
    raise UserError(f'{file} is not a whole safetensors file: {e}.') from None


def open(path) -> Weights:
  """The weights in a Hugging Face folder or a .gguf file. Raises UserError when there are none."""
  path = files.absolute(path)
  if path.suffix == '.gguf' and path.is_file():
    from lns_jax.interop import gguf
    return gguf.GGUFWeights(path)
  if path.is_file() and path.suffix in [p[1:] for p in PICKLES]:
    raise UserError(f'{path} is a pickle, which can run code and is not opened; import_hf.py --from_bin={path.parent} '
                    '--out=FOLDER writes it as safetensors.')
  if path.is_file() and path.suffix == '.safetensors':
    raise UserError(f'{path} is one file of a model; give its folder, {path.parent}.')
  return FolderWeights(path)
