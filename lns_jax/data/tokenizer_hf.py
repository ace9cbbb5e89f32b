"""The tokenizers that a tokenizer.json holds."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from lns_jax.data.tokenizer_base import Tokenizer, ends, piece_bytes, save_names

_BOS_NAMES = ('<bos>', '<s>', '<|begin_of_text|>', '[CLS]')
_MASK_NAMES = ('[MASK]', '<mask>')
_EOS_NAMES = ('<eos>', '</s>', '<|end_of_text|>', '<|endoftext|>', '[SEP]')


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
    self.eos_ids = ends(self.eos_id, eos_ids)
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

  def with_bos(self, adds_bos: bool) -> 'HFTokenizer':
    return HFTokenizer(self.text, name=self.name, bos=self.bos or '', eos=self.eos or '', adds_bos=adds_bos,
                       eos_ids=self.eos_ids)

  def _bytes_of(self, token: int) -> int:
    piece = self._inner.id_to_token(token)
    if piece is None or token in self._special:
      return 0
    if token in self._added:  # as text, in every alphabet
      return len(piece.encode())
    return len(piece) if self._byte_level else piece_bytes(piece)

  def save(self, folder) -> None:
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'tokenizer.json').write_text(self.text, encoding='utf-8')
    save_names(folder, self, {'bos_token': self.bos, 'eos_token': self.eos,
                               'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False})


def _bos_first(bos: str, bos_id: int):
  """The post-processor that puts BOS before each text, as Llama's does."""
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
