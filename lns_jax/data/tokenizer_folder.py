"""What the files of a model's folder say about its tokenizer, beside the vocabulary."""

import pathlib

from lns_jax import files
from lns_jax.data import byte_bpe
from lns_jax.errors import UserError, nearest

# Splits of the classes that keep only a vocabulary and merges.
_SPLITS = {'GPT2Tokenizer': 'gpt-2', 'Qwen2Tokenizer': 'qwen2'}
# Classes that put BOS before a text unless add_bos_token says otherwise, with which they overrule what tokenizer.json
# does (DeepSeek-LLM's puts none). For every other class tokenizer.json alone decides, as in transformers.
_LLAMA = ('LlamaTokenizer', 'CodeLlamaTokenizer', 'GemmaTokenizer')


def find(folder: pathlib.Path) -> pathlib.Path | None:
  """The file of a folder that holds its tokenizer's vocabulary."""
  for names in (('tokenizer.json',), ('tokenizer.model',), ('vocab.json', 'merges.txt')):
    if all((folder / name).exists() for name in names):
      return folder / names[0]
  return None


def facts(path: pathlib.Path) -> dict:
  """Arguments of the tokenizer classes that the files beside `path` decide."""
  names = {**_json(path, 'special_tokens_map.json'), **_json(path, 'tokenizer_config.json')}
  found = {'name': names.get('name', path.name), 'bos': _token(names, 'bos_token'), 'eos': _token(names, 'eos_token'),
           'adds_bos': names.get('add_bos_token'), 'added': _added(path, names)}
  kind = (names.get('tokenizer_class') or '').removesuffix('Fast')
  if path.name == 'vocab.json' and kind in ('', 'GPT2Tokenizer') and found['bos'] is None:
    found['bos'] = '<|endoftext|>'
  if path.suffix == '.json' and path.name != 'vocab.json' and kind not in _LLAMA:
    found['adds_bos'] = None
  if path.suffix == '.model' and found['adds_bos'] is None:  # one without a class is taken for Llama's
    found['adds_bos'] = not kind or kind in _LLAMA
  ends = _ids(names.get('eos_token_ids'))
  for config in (_json(path, 'generation_config.json'), _json(path, 'config.json')):
    ends = ends or _ids(config.get('eos_token_id'))
    if found['bos'] is None and _ids(config.get('bos_token_id')):
      found['bos'] = _ids(config['bos_token_id'])[0]
  if found['eos'] is None and ends:
    found['eos'] = ends[0]
  return found | {'eos_ids': ends}


def from_vocab(path: pathlib.Path) -> str:
  """The tokenizer.json that a vocab.json with the merges.txt beside it amounts to.

  Raises:
    UserError: their tokenizer's class, and so how it splits text, is not known.
  """
  names = _json(path, 'tokenizer_config.json')
  kind = (names.get('tokenizer_class') or 'GPT2Tokenizer').removesuffix('Fast')
  if kind not in _SPLITS:
    raise UserError(f'{path} is of a tokenizer class {kind}, whose way to split text is not known without a '
                    f'tokenizer.json.{nearest(kind, _SPLITS)}')
  vocab = files.read_json(path)
  lines = path.with_name('merges.txt').read_text(encoding='utf-8').split('\n')
  special = ['<|endoftext|>'] if '<|endoftext|>' in vocab else []
  return byte_bpe.build(vocab, byte_bpe.read_merges(lines), byte_bpe.SPLITS[_SPLITS[kind]], special).to_str()


def _json(path: pathlib.Path, name: str) -> dict:
  beside = path.with_name(name)
  return files.read_json(beside) if beside.exists() else {}


def _token(names: dict, key: str) -> str | None:
  """A special token: '' where the files say there is none, None where they say nothing."""
  token = names.get(key)
  token = token.get('content') if isinstance(token, dict) else token  # as older files write it
  if token is not None and not isinstance(token, str):
    raise UserError(f'{key} = {token!r} is not a text in the files of the tokenizer.')
  return token or '' if key in names else None


def _ids(value) -> tuple[int, ...]:
  """eos_token_id of a config: a number, a list or nothing; -1 is how some write that there is none."""
  found = value if isinstance(value, list) else [] if value is None else [value]
  if any(isinstance(i, bool) or not isinstance(i, int) for i in found):
    raise UserError(f'{value!r} is not the id of a token, nor a list of them, in the config files of the tokenizer.')
  return tuple(i for i in found if i >= 0)


def _added(path: pathlib.Path, names: dict) -> dict[int, tuple[str, bool]]:
  """{id: (token, whether it is special)} of tokens above the vocabulary."""
  special = {_token(names, key) for key, v in names.items() if key.endswith('_token') and isinstance(v, str | dict)}
  special |= {t['content'] if isinstance(t, dict) else t for t in names.get('additional_special_tokens') or ()}
  added = {i: (token, token in special) for token, i in _json(path, 'added_tokens.json').items()}
  return added | {int(i): (t['content'], t.get('special', False))
                  for i, t in names.get('added_tokens_decoder', {}).items()}
