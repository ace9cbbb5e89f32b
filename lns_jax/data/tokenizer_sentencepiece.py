"""The tokenizers that a SentencePiece `.model` file holds."""

import hashlib
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from lns_jax.data.tokenizer_base import Tokenizer, ends, piece_bytes, save_names


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
    self.bos, self.eos = map(self._piece, (self.bos_id, self.eos_id))
    self.eos_ids = ends(self.eos_id, eos_ids)
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

  def with_bos(self, adds_bos: bool) -> 'SentencePieceTokenizer':
    bos, eos = ('' if i is None else i for i in (self.bos_id, self.eos_id))
    return SentencePieceTokenizer(self.proto, name=self.name, bos=bos, eos=eos, adds_bos=adds_bos,
                                  eos_ids=self.eos_ids, added=self.added)

  def _piece(self, token: int | None) -> str | None:
    return None if token is None else self.added[token][0] if token in self.added else self._inner.id_to_piece(token)

  def _bytes_of(self, token: int) -> int:
    sp = self._inner
    if token >= sp.vocab_size():
      text, special = self.added.get(token, ('', True))
      return 0 if special else len(text.encode())
    if sp.is_control(token) or sp.is_unknown(token) or sp.is_unused(token):
      return 0
    return piece_bytes(sp.id_to_piece(token))

  def save(self, folder) -> None:
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'tokenizer.model').write_bytes(self.proto)
    names = {'bos_token': self.bos, 'eos_token': self.eos}
    if self.added:
      names['added_tokens_decoder'] = {str(i): {'content': t, 'special': s} for i, (t, s) in self.added.items()}
    save_names(folder, self, names)
