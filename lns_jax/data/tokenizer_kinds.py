"""What a tokenizer is, and the two kinds there are: the `tokenizers` library's and SentencePiece's.

A tokenizer turns text into ids and never adds a special token: BOS and EOS are put around a text by whoever uses it
(`adds_bos` says whether the model was given BOS), once (two BOS is a classic fault), and text that spells `<eos>` is
text unless the caller says otherwise, as for a chat prompt.
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

# A document longer than this is encoded in pieces, so that memory is bounded.
PIECE_CHARS = 1 << 16

_BOS_NAMES = ('<bos>', '<s>', '<|begin_of_text|>', '[CLS]')
_MASK_NAMES = ('[MASK]', '<mask>')
_EOS_NAMES = ('<eos>', '</s>', '<|end_of_text|>', '<|endoftext|>', '[SEP]')


class Tokenizer(abc.ABC):
  """What the rest of the package knows of a tokenizer.

  Attributes:
    name: short, for people. vocab_size: V, ids are 0..V-1. bos_id, eos_id, mask_id: int or None.
    eos_ids: all ids after which a generated text is over, eos_id first.
    adds_bos: whether a text given to the model starts with BOS, as the tokenizer's files say.
    hash: sha256 (hex) of everything that decides its output.
  """

  name: str
  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  eos_ids: tuple[int, ...]
  adds_bos: bool
  hash: str
  mask_id: int | None = None

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
    """Ids of each text as int32 [n]; none is added, and a special token spelled in it is text unless `special`."""

  @abc.abstractmethod
  def decode(self, ids: Sequence[int]) -> str:
    """Text of the ids; special tokens are left out, broken UTF-8 becomes U+FFFD."""

  @abc.abstractmethod
  def save(self, folder) -> None:
    """Writes the files that `load(folder)` reads."""

  @abc.abstractmethod
  def _bytes_of(self, token: int) -> int:
    """Number of UTF-8 bytes that one token stands for."""

  def encode(self, text: str, *, special: bool = False) -> np.ndarray:
    """Ids of one text as int32 [n], as `encode_batch` does it."""
    return self.encode_batch([text], special=special)[0]

  def spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids of one text as int32 [n], the characters text[start:end] that each stands for as int32 [n, 2])."""
    raise UserError(f'tokenizer {self.name} does not say which characters a token stands for; a tokenizer.json does.')

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

  def __init__(self, text: str, *, name: str = 'tokenizer.json', bos: str | int | None = None,
               eos: str | int | None = None, adds_bos: bool | None = None, eos_ids: Sequence[int] = (),
               added: dict[int, tuple[str, bool]] | None = None):
    """From the text of a tokenizer.json.

    Args:
      name: short, for people.
      bos, eos: the token or its id; '': there is none; None: the first known name that is a special token.
      adds_bos: whether a text starts with BOS; None: whether the file's own post-processor puts it there.
      eos_ids: further ids that end a text.
      added: {id: (token, whether it is special)} beside those of the file.

    Raises:
      ValueError: a special token is not in the vocabulary, or an added one would have another id.
    """
    import tokenizers  # not needed by whoever only reads prepared data
    inner = tokenizers.Tokenizer.from_str(text)
    inner.no_padding()
    inner.no_truncation()
    if _add(inner, added or {}):
      text = inner.to_str()
    inner.encode_special_tokens = True  # '<eos>' written in a text is five characters, not the end
    self._inner, self.text, self.name = inner, text, name
    # Ids may have holes, so the count is not the bound.
    self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
    self._added = {i: t.content for i, t in inner.get_added_tokens_decoder().items()}
    self._special = {i for i, t in inner.get_added_tokens_decoder().items() if t.special}
    self.bos, self.eos = self._find(bos, _BOS_NAMES), self._find(eos, _EOS_NAMES)
    self.bos_id = None if self.bos is None else inner.token_to_id(self.bos)
    self.eos_id = None if self.eos is None else inner.token_to_id(self.eos)
    self.eos_ids = _ends(self.eos_id, eos_ids)
    self.adds_bos = self._puts_bos() if adds_bos is None else adds_bos and self.bos is not None
    if self.adds_bos != self._puts_bos():  # so that the file says it too when it is saved
      inner.post_processor = _bos_first(self.bos, self.bos_id) if self.adds_bos else None
      self.text = text = inner.to_str()
    mask = self._find(None, _MASK_NAMES)
    self.mask_id = None if mask is None else inner.token_to_id(mask)
    self._byte_level = '"ByteLevel"' in json.dumps(json.loads(inner.to_str())['decoder'])
    self.hash = hashlib.sha256(f'{text}\n{self.bos_id} {self.eos_id}'.encode()).hexdigest()

  def _find(self, given: str | int | None, names: Sequence[str]) -> str | None:
    """The given special token ('': there is none), or the first known name; None: there is none."""
    if given is None:
      return next((n for n in names if n in (self._added[i] for i in self._special)), None)
    token = self._inner.id_to_token(given) if isinstance(given, int) else given
    if token is None or token and self._inner.token_to_id(token) is None:
      raise ValueError(f'its special token {given!r} is not in its vocabulary')
    return token or None

  def _puts_bos(self) -> bool:
    """Whether the post-processor, which is not used here, puts BOS before a text."""
    return self.bos_id is not None and self._inner.encode('a').ids[:1] == [self.bos_id]

  @functools.cached_property
  def _reads_special(self):
    """A second one, since the choice is a state of the object and not of the call."""
    import tokenizers
    inner = tokenizers.Tokenizer.from_str(self.text)
    inner.no_padding()
    inner.no_truncation()
    return inner

  def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
    inner = self._reads_special if special else self._inner
    return [np.array(e.ids, np.int32) for e in inner.encode_batch_fast(list(texts), add_special_tokens=False)]

  def spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    encoded = self._inner.encode(text, add_special_tokens=False)
    return np.array(encoded.ids, np.int32), np.array(encoded.offsets, np.int32).reshape(-1, 2)

  def decode(self, ids: Sequence[int]) -> str:
    return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

  def _bytes_of(self, token: int) -> int:
    piece = self._inner.id_to_token(token)
    if piece is None or token in self._special:
      return 0
    if token in self._added:  # as text, in every alphabet
      return len(piece.encode())
    return len(piece) if self._byte_level else _piece_bytes(piece)

  def save(self, folder) -> None:
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'tokenizer.json').write_text(self.text, encoding='utf-8')
    _save_names(folder, self, {'bos_token': self.bos, 'eos_token': self.eos,
                               'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False})


def _bos_first(bos: str, bos_id: int):
  from tokenizers import processors
  return processors.TemplateProcessing(single=f'{bos}:0 $A:0', pair=f'{bos}:0 $A:0 {bos}:1 $B:1',
                                       special_tokens=[(bos, bos_id)])


def _add(inner, added: dict[int, tuple[str, bool]]) -> bool:
  """Adds what the vocabulary lacks of {id: (token, special)}; whether there was any."""
  import tokenizers
  missing = {i: t for i, t in sorted(added.items()) if inner.token_to_id(t[0]) is None}
  for token_id, (token, special) in missing.items():
    inner.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    if inner.token_to_id(token) != token_id:
      raise ValueError(f'its added token {token!r} should have id {token_id} and the next free one is '
                       f'{inner.token_to_id(token)}')
  return bool(missing)


def _ends(eos_id: int | None, others: Sequence[int]) -> tuple[int, ...]:
  return tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *others]))


def _save_names(folder: pathlib.Path, tokenizer: Tokenizer, names: dict):
  """The tokenizer_config.json that `lns_jax.data.tokenizer_folder` reads, and transformers where it knows a key."""
  names |= {'add_bos_token': bool(tokenizer.adds_bos), 'name': tokenizer.name}
  if len(tokenizer.eos_ids) > 1:
    names['eos_token_ids'] = list(tokenizer.eos_ids)
  (folder / 'tokenizer_config.json').write_text(json.dumps(names, indent=2) + '\n')


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece `.model` file, T5's and Llama's kind; spaces are as SentencePiece itself does them."""

  def __init__(self, proto: bytes, *, name: str = 'tokenizer.model', bos: str | int | None = None,
               eos: str | int | None = None, adds_bos: bool | None = None, eos_ids: Sequence[int] = (),
               added: dict[int, tuple[str, bool]] | None = None):
    """From the bytes of the file. Arguments as of `HFTokenizer`; bos, eos None: the file's own; adds_bos None: if it
    has one, as Llama's; added tokens with ids of the file's own are its own."""
    import sentencepiece
    self._inner = sp = sentencepiece.SentencePieceProcessor(model_proto=proto)
    self.proto, self.name = proto, name
    self.added = {i: t for i, t in sorted((added or {}).items()) if i >= sp.vocab_size()}
    self.vocab_size = max([sp.vocab_size() - 1, *self.added]) + 1
    control = {sp.id_to_piece(i): i for i in range(sp.vocab_size()) if sp.is_control(i)}
    self._texts = {t: i for i, (t, special) in self.added.items() if not special}
    self._special = control | {t: i for i, (t, special) in self.added.items() if special}
    own = [i if i >= 0 else None for i in (sp.bos_id(), sp.eos_id())]
    self.bos_id, self.eos_id = (self._find(given, i) for given, i in zip((bos, eos), own, strict=True))
    self.eos_ids = _ends(self.eos_id, eos_ids)
    self.adds_bos = (adds_bos is None or adds_bos) and self.bos_id is not None
    more = repr((self.bos_id, self.eos_id, self.added)) if self.added or [self.bos_id, self.eos_id] != own else ''
    self.hash = hashlib.sha256(proto + more.encode()).hexdigest()

  def _find(self, given: str | int | None, own: int | None) -> int | None:
    """Id of the given special token ('': there is none)."""
    if given in (None, ''):
      return own if given is None else None
    sp = self._inner
    found = given if isinstance(given, int) else self._special.get(given, self._texts.get(given, sp.piece_to_id(given)))
    if found >= self.vocab_size or not isinstance(given, int) and found == sp.unk_id() != own:
      raise ValueError(f'its special token {given!r} is not in its vocabulary')
    return found

  def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
    known = self._texts | (self._special if special else {})
    if not known:
      return [np.array(ids, np.int32) for ids in self._inner.encode(list(texts), num_threads=1)]
    pattern = re.compile('|'.join(re.escape(t) for t in sorted(known, key=len, reverse=True)))
    return [self._encode_around(pattern, known, text) for text in texts]

  def _encode_around(self, pattern: re.Pattern, known: dict[str, int], text: str) -> np.ndarray:
    """Ids of a text in which the pattern's tokens stand for themselves, each part between them a text of its own."""
    ids, at = [], 0
    for found in pattern.finditer(text):
      ids += [*(self._inner.encode(text[at:found.start()]) if found.start() > at else ()), known[found[0]]]
      at = found.end()
    return np.array(ids + (self._inner.encode(text[at:]) if at < len(text) else []), np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    parts, run = [], []
    for i in map(int, ids):
      if i in self.added:
        text, special = self.added[i]
        parts += [self._inner.decode(run), '' if special else text]
        run = []
      elif i < self._inner.vocab_size():  # rows above it are padding of the model's
        run.append(i)
    return ''.join([*parts, self._inner.decode(run)])

  def _piece(self, token: int | None) -> str | None:
    return None if token is None else self.added[token][0] if token in self.added else self._inner.id_to_piece(token)

  def _bytes_of(self, token: int) -> int:
    sp = self._inner
    if token >= sp.vocab_size():
      text, special = self.added.get(token, ('', True))
      return 0 if special else len(text.encode())
    if sp.is_control(token) or sp.is_unknown(token) or sp.is_unused(token):
      return 0
    return _piece_bytes(sp.id_to_piece(token))

  def save(self, folder) -> None:
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'tokenizer.model').write_bytes(self.proto)
    names = {'bos_token': self._piece(self.bos_id), 'eos_token': self._piece(self.eos_id)}
    if self.added:
      names['added_tokens_decoder'] = {str(i): {'content': t, 'special': s} for i, (t, s) in self.added.items()}
    _save_names(folder, self, names)


def _piece_bytes(piece: str) -> int:
  """Bytes of a SentencePiece-style piece: U+2581 is a space, <0x0A> is one byte."""
  return 1 if re.fullmatch(r'<0x[0-9A-F]{2}>', piece) else len(piece.replace('\u2581', ' ').encode())
