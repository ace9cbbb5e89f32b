"""Byte-level BPE of the `tokenizers` library, and the ways in which known models split text before it.

Vocabulary and merges alone do not say where words end, so files that hold only those (vocab.json with merges.txt,
GGUF) name a split: `SPLITS` has what the models' own tokenizer.json do under the names that GGUF files use.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lns_jax.errors import UserError, nearest

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Words with one sign before them, digits by groups, signs with line ends after them, line ends, other white space.
_GROUPS = (_CONTRACTIONS + r'|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
_THREES, _SINGLE = _GROUPS % '{1,3}', _GROUPS % ''
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = '[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7a3]+'
# Its list of letters is Unicode's cased ones of before Georgian had cases.
_DEEPSEEK = (r'[\r\n]', r'\s?[\p{Lu}\p{Ll}\p{Lt}&&[^' + '\u10d0-\u10ff]]+',
             r'\s?' + '[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+', r'\s+$', _CJK, r'\p{N}+')


class Split(NamedTuple):
  """How text is cut before BPE.

  Attributes:
    patterns: regular expressions, each cutting what those before it left.
    nfc: whether text is brought to Unicode's form NFC first.
    whole: whether a word that is in the vocabulary is taken without regard to the merges.
    bos: whether a text starts with BOS where the file does not say.
  """

  patterns: tuple[str, ...]
  nfc: bool = False
  whole: bool = False
  bos: bool = False


_LLAMA3 = Split((_THREES,), whole=True, bos=True)
SPLITS = {
    'gpt-2': Split((_GPT2,)), 'olmo': Split((_GPT2,)), 'phi-2': Split((_GPT2,)),
    'llama-bpe': _LLAMA3, 'llama3': _LLAMA3, 'llama-v3': _LLAMA3, 'dbrx': Split((_THREES,)),
    'qwen2': Split((_SINGLE,), nfc=True), 'deepseek-r1-qwen': Split((_SINGLE,), nfc=True),
    'smollm': Split((r'\p{N}', _GPT2)), 'starcoder': Split((r'\p{N}', _GPT2)),
    'deepseek-llm': Split(_DEEPSEEK), 'deepseek-coder': Split(
        (r'[\r\n]', r'\s?\p{L}+', r'\s?\p{P}+', _CJK, r'\p{N}')),
    'default': Split((r'[\p{P}\$\+<=>\^~\|]+', _GPT2, r'\p{N}+', '[0-9][0-9][0-9]')),
}


def split(name: str, where: str) -> Split:
  """The split of that name. Raises UserError, with `where` it stands, for one that is not known."""
  if name not in SPLITS:
    raise UserError(f'{where} names the pre-tokenizer {name!r}, which is not known.{nearest(name, SPLITS)}')
  return SPLITS[name]


# Tells the splits apart: contractions, digits, scripts, signs, runs of white space.
_PROBE = "I'M don't HE'LL 12345 x²½ ٣\n\n  two\t東京、。한 «é» <a>\r\n  \n end-- $5 ~x \u10d0\u10d1  "


def name_of(inner) -> str | None:
  """The first split that cuts as a `tokenizers.Tokenizer` does; None: none known."""
  cuts = lambda made: made.pre_tokenizer.pre_tokenize_str(_PROBE) if made.pre_tokenizer else None
  nfc = inner.normalizer is not None and inner.normalizer.normalize_str('e\u0301') == '\u00e9'
  if inner.normalizer is not None and inner.normalizer.normalize_str(' É \u210c') != ' É \u210c':
    return None  # it does more than NFC
  vocab = {char: i for i, char in enumerate(alphabet())}
  return next((name for name, s in SPLITS.items() if (s.nfc, s.whole) == (nfc, inner.model.ignore_merges)
               and cuts(build(vocab, [], s)) == cuts(inner)), None)


def build(vocab: dict[str, int], merges: Sequence[tuple[str, str]], cut: Split = SPLITS['gpt-2'],
          special: Iterable[str] = (), added: Iterable[str] = ()):
  """A `tokenizers.Tokenizer`.

  Args:
    vocab: {token in the byte alphabet, or text of a special or added token: id}.
    merges: pairs, the first to be merged first.
    cut: how text is cut before.
    special, added: tokens that stand for themselves; special ones have no text.
  """
  import tokenizers
  from tokenizers import decoders, normalizers, pre_tokenizers
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, list(merges), ignore_merges=cut.whole))
  if cut.nfc:
    inner.normalizer = normalizers.NFC()
  if cut.patterns == (_GPT2,):
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  else:
    cuts = [pre_tokenizers.Split(tokenizers.Regex(p), 'isolated') for p in cut.patterns]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  inner.decoder = decoders.ByteLevel()
  inner.add_special_tokens(list(special))
  inner.add_tokens([tokenizers.AddedToken(a, normalized=False) for a in added])
  return inner


def read_merges(lines: Iterable[str]) -> list[tuple[str, str]]:
  """Pairs of the lines 'left right' of a merges.txt or a GGUF file."""
  pairs = [tuple(line.split(' ')) for line in lines if line and not line.startswith('#version')]
  wrong = next((p for p in pairs if len(p) != 2), None)
  if wrong is not None:
    raise ValueError(f'the merge {" ".join(wrong)!r} is not a pair')
  return pairs


def alphabet() -> list[str]:
  """The character that GPT-2's byte-level scheme writes for each byte 0..255."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in plain]
  chars = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
  return [chars[b] for b in range(256)]
