"""What a tokenizer is; the kinds that there are: `tokenizer_hf` and `tokenizer_sentencepiece`.

A tokenizer turns text into ids and never adds a special token: BOS and EOS are put around a text by whoever uses it
(`adds_bos` says whether the model was given BOS), once (two BOS is a classic fault), and text that spells `<eos>` is
text unless the caller says otherwise, as for a chat prompt.
"""

import abc
import functools
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

from lns_jax.errors import UserError

# A document longer than this is encoded in pieces, so that memory is bounded.
PIECE_CHARS = 1 << 16


class Tokenizer(abc.ABC):
  """What the rest of the package knows of a tokenizer.

  Attributes:
    name: short, for people. vocab_size: V, ids are 0..V-1. bos_id, eos_id, mask_id: int or None.
    bos, eos: how the two are spelled; None where there is none.
    eos_ids: all ids after which a generated text is over, eos_id first.
    adds_bos: whether a text given to the model starts with BOS, as the tokenizer's files say.
    hash: sha256 (hex) of everything that decides its output.
  """

  name: str
  vocab_size: int
  bos: str | None
  eos: str | None
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
  def with_bos(self, adds_bos: bool) -> 'Tokenizer':
    """The same tokenizer, its files saying that a text starts with BOS, if there is one, or that it does not."""

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


def ends(eos_id: int | None, others: Sequence[int]) -> tuple[int, ...]:
  """`Tokenizer.eos_ids`."""
  return tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *others]))


def save_names(folder: pathlib.Path, tokenizer: Tokenizer, names: dict):
  """The tokenizer_config.json that `lns_jax.data.tokenizer_folder` reads, and transformers where it knows a key."""
  names |= {'add_bos_token': bool(tokenizer.adds_bos), 'name': tokenizer.name}
  if len(tokenizer.eos_ids) > 1:
    names['eos_token_ids'] = list(tokenizer.eos_ids)
  (folder / 'tokenizer_config.json').write_text(json.dumps(names, indent=2) + '\n')


def piece_bytes(piece: str) -> int:
  """Bytes of a SentencePiece-style piece: U+2581 is a space, <0x0A> is one byte."""
  return 1 if re.fullmatch(r'<0x[0-9A-F]{2}>', piece) else len(piece.replace('\u2581', ' ').encode())
