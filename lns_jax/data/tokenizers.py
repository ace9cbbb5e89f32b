"""Tokenizers behind one interface: byte-level BPE trained here, bytes, `tokenizer.json` and SentencePiece files.

A tokenizer turns text into ids and never adds a special token: BOS and EOS are put around a document by
`lns_jax.data.packing`, once (two BOS is a classic fault), and text that spells `<eos>` is text.
"""

import abc
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

from lns_jax.errors import UserError

# Enough text for any vocabulary up to 32k; more changes little and costs seconds.
BPE_TRAINING_BYTES = 16_000_000
# Part of the fingerprint of prepared data: raise it when training changes its result.
BPE_RULE = 'byte-level BPE, GPT-2 split, rule 1'
BOS, EOS = '<bos>', '<eos>'
# A document longer than this is encoded in pieces, so that memory is bounded.
PIECE_CHARS = 1 << 16

_BOS_NAMES = ('<bos>', '<s>', '<|begin_of_text|>', '[CLS]')
_EOS_NAMES = ('<eos>', '</s>', '<|end_of_text|>', '<|endoftext|>', '[SEP]')


class Tokenizer(abc.ABC):
  """What the rest of the package knows of a tokenizer.

  Attributes:
    name: short, for people. vocab_size: V, ids are 0..V-1. bos_id, eos_id: int or None.
    hash: sha256 (hex) of everything that decides its output.
  """

  name: str
  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  hash: str

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of each text as int32 [n], without special tokens."""

  @abc.abstractmethod
  def decode(self, ids: Sequence[int]) -> str:
    """Text of the ids; special tokens are left out, broken UTF-8 becomes U+FFFD."""

  @abc.abstractmethod
  def save(self, folder) -> None:
    """Writes the files that `load(folder)` reads."""

  @abc.abstractmethod
  def _bytes_of(self, token: int) -> int:
    """Number of UTF-8 bytes that one token stands for."""

  def encode(self, text: str) -> np.ndarray:
    """Ids of one text as int32 [n], without special tokens."""
    return self.encode_batch([text])[0]

  def id_of(self, token: str) -> int | None:
    """The id of a special token by its text; None: there is none."""
    return None

  @functools.cached_property
  def token_bytes(self) -> np.ndarray:
    """int32 [V]: UTF-8 bytes each token stands for, 0 for special tokens.

    Bits per byte of a scored text is nats / ln 2 / sum(token_bytes[targets]).
    """
    return np.array([self._bytes_of(i) for i in range(self.vocab_size)], np.int32)

  @functools.cached_property
  def _drops_space(self) -> bool:
    """Whether a text implies a space at its start (SentencePiece), so that a piece must not repeat it."""
    whole, first, bare = (list(e) for e in self.encode_batch(['so it is', 'so', 'it is']))
    return whole == first + bare

  def pieces(self, chunks: Iterable[str]) -> Iterable[str]:
    """Cuts a document (given in chunks of any length) into texts that `encode_batch` takes one by one.

    The ids of the pieces together are the ids of the whole document: cuts lie before a single space
    between two words, where no tokenizer known to us joins. Only a run of `PIECE_CHARS` characters
    without such a place is cut anywhere, so that memory is bounded for every input.
    """
    rest, started = '', False
    for more in (chunk[at:at + PIECE_CHARS] for chunk in chunks for at in range(0, len(chunk), PIECE_CHARS)):
      rest += more
      while len(rest) > PIECE_CHARS:
        spaces = [m.start() for m in re.finditer(r'(?<=\S) (?=\S)', rest[:PIECE_CHARS])]
        cut = spaces[-1] if spaces else PIECE_CHARS
        yield rest[:cut]
        rest, started = rest[cut + (bool(spaces) and self._drops_space):], True
    if rest or not started:
      yield rest


class HFTokenizer(Tokenizer):
  """A `tokenizer.json` of the Hugging Face `tokenizers` library."""

  def __init__(self, text: str, *, name: str = 'tokenizer.json', bos: str | None = None, eos: str | None = None):
    import tokenizers  # here and below: not needed by whoever only reads prepared data
    self._inner = tokenizers.Tokenizer.from_str(text)
    self._inner.no_padding()
    self._inner.no_truncation()
    self._inner.encode_special_tokens = True  # '<eos>' written in a text is five characters, not the end
    self.name = name
    # Ids may have holes, so the count is not the bound.
    self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
    self._special = {i: t.content for i, t in self._inner.get_added_tokens_decoder().items() if t.special}
    self.bos, self.eos = self._find(bos, _BOS_NAMES), self._find(eos, _EOS_NAMES)
    self.bos_id = None if self.bos is None else self._inner.token_to_id(self.bos)
    self.eos_id = None if self.eos is None else self._inner.token_to_id(self.eos)
    self._byte_level = '"ByteLevel"' in json.dumps(json.loads(text).get('decoder'))
    self._text = text
    self.hash = hashlib.sha256(f'{text}\n{self.bos_id} {self.eos_id}'.encode()).hexdigest()

  def _find(self, given: str | None, names: Sequence[str]) -> str | None:
    """The given special token ('': there is none), or the first known name; None: there is none."""
    if given is None:
      return next((n for n in names if n in self._special.values()), None)
    if given and self._inner.token_to_id(given) is None:
      raise ValueError(f'its special token {given!r} is not in its vocabulary')
    return given or None

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(e.ids, np.int32) for e in encoded]

  def decode(self, ids: Sequence[int]) -> str:
    return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

  def id_of(self, token: str) -> int | None:
    return next((i for i, text in self._special.items() if text == token), None)

  def _bytes_of(self, token: int) -> int:
    piece = self._inner.id_to_token(token)
    if piece is None or token in self._special:
      return 0
    return len(piece) if self._byte_level else _piece_bytes(piece)

  def save(self, folder) -> None:
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'tokenizer.json').write_text(self._text, encoding='utf-8')
    names = {'bos_token': self.bos, 'eos_token': self.eos, 'name': self.name,
             'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False}
    (folder / 'tokenizer_config.json').write_text(json.dumps(names, indent=2) + '\n')


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece `.model` file, T5's and Llama's kind."""

  def __init__(self, proto: bytes, *, name: str = 'tokenizer.model'):
    import sentencepiece
    self._inner = sentencepiece.SentencePieceProcessor(model_proto=proto)
    self.proto, self.name = proto, name
    self.vocab_size = self._inner.vocab_size()
    self.bos_id, self.eos_id = (i if i >= 0 else None for i in (self._inner.bos_id(), self._inner.eos_id()))
    self.hash = hashlib.sha256(proto).hexdigest()

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in self._inner.encode(list(texts), num_threads=1)]

  def decode(self, ids: Sequence[int]) -> str:
    return self._inner.decode([int(i) for i in ids])

  def _bytes_of(self, token: int) -> int:
    sp = self._inner
    if sp.is_control(token) or sp.is_unknown(token) or sp.is_unused(token):
      return 0
    return _piece_bytes(sp.id_to_piece(token))

  def save(self, folder) -> None:
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'tokenizer.model').write_bytes(self.proto)


def _piece_bytes(piece: str) -> int:
  """Bytes of a SentencePiece-style piece: U+2581 is a space, <0x0A> is one byte."""
  return 1 if re.fullmatch(r'<0x[0-9A-F]{2}>', piece) else len(piece.replace('\u2581', ' ').encode())


def _new_bpe(vocab: dict[str, int], merges: list):
  """An empty or given byte-level BPE of the `tokenizers` library."""
  import tokenizers
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  return inner


def train_bpe(texts: Iterable[str], vocab_size: int) -> HFTokenizer:
  """Trains a byte-level BPE with <bos> and <eos> on at most `BPE_TRAINING_BYTES` of text.

  The same texts give the same tokenizer. Little text gives fewer than `vocab_size` tokens.

  Raises:
    UserError: if vocab_size has no room for the 256 bytes and two special tokens.
  """
  import tokenizers
  if vocab_size < 258:
    raise UserError(f'model.vocab_size = {vocab_size} is too small for a byte-level BPE; 258 would do.')
  inner = _new_bpe({}, [])
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size, special_tokens=[BOS, EOS], show_progress=False,
      initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
  inner.train_from_iterator(_bounded(texts, BPE_TRAINING_BYTES), trainer)
  return HFTokenizer(inner.to_str(), name=f'bpe-{vocab_size}')


def _bounded(texts: Iterable[str], limit: int) -> Iterable[str]:
  """The texts up to `limit` characters, long ones in pieces: a trainer's memory is many times a text's."""
  for text in texts:
    for at in range(0, min(len(text), limit), PIECE_CHARS):
      yield text[at:min(at + PIECE_CHARS, limit)]
    limit -= len(text)
    if limit <= 0:
      return


def byte_tokenizer() -> HFTokenizer:
  """Ids 0..255 are the bytes, 256 is <bos>, 257 is <eos>: a byte-level BPE without merges."""
  inner = _new_bpe({char: byte for byte, char in enumerate(_byte_alphabet())}, [])
  inner.add_special_tokens([BOS, EOS])
  return HFTokenizer(inner.to_str(), name='byte')


def _byte_alphabet() -> list[str]:
  """The character that GPT-2's byte-level scheme writes for each byte 0..255."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in plain]
  chars = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
  return [chars[b] for b in range(256)]


FILES = ('tokenizer.json', 'tokenizer.model')


def is_in(folder) -> bool:
  """Whether a folder holds the file of a tokenizer."""
  return any((pathlib.Path(folder) / name).is_file() for name in FILES)


def load(path) -> Tokenizer:
  """Reads a tokenizer from `tokenizer.json`, a SentencePiece `.model`, or a folder that holds one of them.

  Raises:
    UserError: if there is no such file, or it cannot be read.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    found = [f for f in (path / 'tokenizer.json', path / 'tokenizer.model') if f.exists()]
    if not found:
      raise UserError(f'{path} holds neither tokenizer.json nor tokenizer.model.')
    path = found[0]
  if not path.is_file():
    raise UserError(f'tokenizer {str(path)!r} is not a file; known besides files: bpe, byte.')
  try:
    if path.suffix == '.model':
      return SentencePieceTokenizer(path.read_bytes(), name=path.name)
    config = path.parent / 'tokenizer_config.json'
    names = json.loads(config.read_text()) if config.exists() else {}
    return HFTokenizer(path.read_text(encoding='utf-8'), name=names.get('name', path.name),
                       bos=_special(names, 'bos_token'), eos=_special(names, 'eos_token'))
  except Exception as error:  # both libraries raise bare Exception or RuntimeError for a damaged file
    raise UserError(f'{path} is not a tokenizer that can be read: {_first_line(error)}.') from None


def _special(names: dict, key: str) -> str | None:
  """A special token of a tokenizer_config.json: '' where it says there is none, None where it says nothing."""
  token = names.get(key)
  token = token.get('content') if isinstance(token, dict) else token  # as older files write it
  return token or '' if key in names else None


def _first_line(error: Exception) -> str:
  return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip('.')


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Refuses a tokenizer whose ids do not fit the model's vocabulary."""
  if tokenizer.vocab_size > vocab_size:
    raise UserError(f'tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens but model.vocab_size is '
                    f'{vocab_size}; set model.vocab_size = {tokenizer.vocab_size} or more.')
