"""Tiny Hugging Face folders: those of tests/fixtures/hf (made by make_folders.py), and changed copies of them."""

import json
import pathlib
import shutil

import numpy as np
from safetensors import numpy as safetensors

from lns_jax.data import tokenizers

FOLDERS = pathlib.Path(__file__).parent / 'fixtures' / 'hf'
NAMES = sorted(p.name for p in FOLDERS.iterdir())
CLOSE = dict(rtol=0, atol=2e-5)  # logits are of order 1 to 5; 1e-5 was the largest difference seen


def reference(name: str) -> dict[str, np.ndarray]:
  """inputs, logits and, of most, states as transformers computes them."""
  with np.load(FOLDERS / name / 'reference.npz') as found:
    return dict(found)


def tensors(name: str) -> dict[str, np.ndarray]:
  """Of a folder that has no weights of its own, those of the folder that it differs from in settings alone."""
  whole = 'llama' if name.startswith('llama_rope') else 'qwen2_window_off' if 'window' in name else name
  return safetensors.load_file(FOLDERS / whole / 'model.safetensors')


def settings(name: str) -> dict:
  return json.loads((FOLDERS / name / 'config.json').read_text())


def write(path: pathlib.Path, config: dict, shards: list[dict]) -> pathlib.Path:
  """A folder with these tensors, in one file or with an index."""
  path.mkdir(parents=True)
  (path / 'config.json').write_text(json.dumps(config))
  if len(shards) == 1:
    safetensors.save_file(contiguous(shards[0]), path / 'model.safetensors')
    return path
  names = [f'model-{i:05}-of-{len(shards):05}.safetensors' for i in range(1, len(shards) + 1)]
  for file, shard in zip(names, shards):
    safetensors.save_file(contiguous(shard), path / file)
  where = {name: file for file, shard in zip(names, shards) for name in shard}
  (path / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': where}))
  return path


def contiguous(tensors: dict) -> dict:
  return {name: np.ascontiguousarray(x) for name, x in tensors.items()}


def folder(name: str, tmp_path: pathlib.Path, **changes) -> pathlib.Path:
  """A folder by its name, with other fields in its config.json; None takes one out."""
  config = {k: v for k, v in (settings(name) | changes).items() if v is not None}
  return write(tmp_path / name, config, [tensors(name)])


def copy(name: str, tmp_path: pathlib.Path) -> pathlib.Path:
  """The folder as transformers wrote it."""
  return shutil.copytree(FOLDERS / name, tmp_path / name)


def of_text(tmp_path: pathlib.Path, name: str = 'text', tokenizer=None, **changes) -> pathlib.Path:
  """A random Llama that reads bytes (or what the tokenizer makes of a text), with its tokenizer beside it."""
  tokenizer = tokenizer or tokenizers.byte_tokenizer()
  config, found, rng = settings('llama') | changes, tensors('llama'), np.random.default_rng(0)
  config['vocab_size'] = tokenizer.vocab_size + 3  # rows that no token has, as many models have them
  for table in ('lm_head.weight', 'model.embed_tokens.weight'):
    found[table] = rng.standard_normal((config['vocab_size'], 24)).astype(np.float32) / 4
  path = write(tmp_path / name, config, [found])
  tokenizer.save(path)
  return path


def words(size: int = 3) -> tokenizers.HFTokenizer:
  """Pieces of up to `size` characters that are each one token; <s> is 0, </s> is 1."""
  import tokenizers as library
  vocab = {'<s>': 0, '</s>': 1, '<unk>': 2} | {piece: i for i, piece in enumerate(['abc', 'd e', 'fgh', 'i'], 3)}
  inner = library.Tokenizer(library.models.WordLevel(vocab, unk_token='<unk>'))
  inner.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(f'.{{1,{size}}}'), 'isolated')
  inner.add_special_tokens(['<s>', '</s>'])
  return tokenizers.HFTokenizer(inner.to_str(), name='words', bos='<s>', eos='</s>')
