"""PyTorch's pickled checkpoints as safetensors, through torch's loader of tensors alone (`weights_only`)."""

import pathlib
import shutil
import time

from lns_jax import files
from lns_jax.errors import UserError
from lns_jax.interop import shards, weights

PICKLE, PICKLE_INDEX = 'pytorch_model.bin', 'pytorch_model.bin.index.json'
BESIDE = ('*.json', '*.txt', '*.model', '*.tiktoken')  # config and tokenizer, no code


def convert(folder, out) -> dict:
  """Writes `out`, a Hugging Face folder with safetensors, from one with .bin files. One file is in memory at a time.

  Returns:
    {'out', 'files', 'tensors', 'seconds'}.

  Raises:
    UserError: torch is not installed; there are no such files, or one holds more than tensors; `out` exists.
  """
  start, folder, out = time.perf_counter(), files.absolute(folder), files.unused(out)
  try:
    from safetensors import torch as safetensors
  except ImportError:
    raise UserError("--from_bin needs torch: pip install 'lns_jax[parity]'.") from None
  files.read_json(folder / 'config.json')
  sources, where, size = _sources(folder), {}, 0
  with files.whole_folder(out) as partial:
    for source in sources:
      name = source.name.replace('pytorch_model', 'model').replace('.bin', '.safetensors')
      tensors = _read(source)
      safetensors.save_file(tensors, partial / name, metadata={'format': 'pt'})
      where |= dict.fromkeys(tensors, name)
      size += sum(tensor.nbytes for tensor in tensors.values())
    if len(sources) > 1:
      shards.write_index(partial, where, size)
    for pattern in BESIDE:
      for path in folder.glob(pattern):
        if path.name not in (PICKLE_INDEX, weights.INDEX):  # which is of files that stay behind
          shutil.copy(path, partial / path.name)
  return {'out': str(out), 'files': len(sources), 'tensors': len(where), 'seconds': time.perf_counter() - start}


def _sources(folder: pathlib.Path) -> list[pathlib.Path]:
  """The .bin files of a folder. Raises UserError when there are none, or one that the index names is not there."""
  if (folder / PICKLE_INDEX).is_file():
    return sorted(weights.indexed(folder / PICKLE_INDEX))
  if not (folder / PICKLE).is_file():
    raise UserError(f'{folder} has no {PICKLE}.')
  return [folder / PICKLE]


def _read(path: pathlib.Path) -> dict:
  """{name: tensor}, each with memory of its own, as safetensors wants it."""
  import torch
  try:
    found = torch.load(path, map_location='cpu', weights_only=True)
  except Exception as error:  # of pickle, of zip files, of torch itself
    reason = str(error).strip().splitlines()[0]
    raise UserError(f'{path} is not a file of tensors alone: {reason}') from None
  found = found.get('state_dict', found) if isinstance(found, dict) else found
  if not isinstance(found, dict) or not all(isinstance(v, torch.Tensor) for v in found.values()):
    raise UserError(f'{path} does not hold tensors by name.')
  return {name: tensor.clone().contiguous() for name, tensor in found.items()}
