"""PyTorch's pickled checkpoints as safetensors, through torch's loader of tensors alone (`weights_only`)."""

import pathlib
import shutil
import time

from lns_jax import files
from lns_jax.errors import UserError
from lns_jax.interop import save
from lns_jax.interop.weights import INDEX, read_json

PICKLE, PICKLE_INDEX = 'pytorch_model.bin', 'pytorch_model.bin.index.json'
BESIDE = ('*.json', '*.txt', '*.model', '*.tiktoken')  # config and tokenizer, no code


def convert(folder, out) -> dict:
  """Writes `out`, a Hugging Face folder with safetensors, from one with .bin files. One file is in memory at a time.

  Returns:
    {'out', 'files', 'tensors', 'seconds'}.

  Raises:
    UserError: torch is not installed; there are no such files, or one holds more than tensors; `out` exists.
  """
  start, folder, out = time.perf_counter(), files.absolute(folder), save.new_folder(out)
  try:
    from safetensors import torch as safetensors
  except ImportError:
    raise UserError("--from_bin needs torch: pip install 'lns_jax[parity]'.") from None
  read_json(folder / 'config.json')
  sources, where = _sources(folder), {}
  with files.whole_folder(out) as partial:
    for source in sources:
      name = source.name.replace('pytorch_model', 'model').replace('.bin', '.safetensors')
      tensors = _read(source)
      safetensors.save_file(tensors, partial / name, metadata={'format': 'pt'})
      where |= dict.fromkeys(tensors, name)
    if len(sources) > 1:
      files.write_json(partial / INDEX, {'metadata': {}, 'weight_map': where})
    for pattern in BESIDE:
      for path in folder.glob(pattern):
        if path.name not in (PICKLE_INDEX, INDEX):  # which is of files that stay behind
          shutil.copy(path, partial / path.name)
  return {'out': str(out), 'files': len(sources), 'tensors': len(where), 'seconds': time.perf_counter() - start}


def _sources(folder: pathlib.Path) -> list[pathlib.Path]:
  if (folder / PICKLE_INDEX).is_file():
    names = sorted(set(read_json(folder / PICKLE_INDEX).get('weight_map', {}).values()))
    if any(pathlib.PurePath(str(name)).name != name for name in names):
      raise UserError(f'{folder / PICKLE_INDEX} names a file that is not of its own folder.')
  else:
    names = [PICKLE]
  for name in names:
    if not (folder / name).is_file():
      raise UserError(f'{folder} has no {name}.')
  return [folder / name for name in names]


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
