"""A small WordPiece tokenizer with BERT's special tokens."""

import json

import tokenizers as hf

from lns_jax.data import tokenizers

WORDS = ('the a an sun moon star is was in on of red blue green big small sky sea it rises sets where when what color '
         'at night morning , . ? !').split()
SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
PIECES = [*'abcdefghijklmnopqrstuvwxyz', *(f'##{c}' for c in 'abcdefghijklmnopqrstuvwxyz')]
VOCAB = {token: i for i, token in enumerate([*SPECIAL, *WORDS, *(p for p in PIECES if p not in WORDS)])}


def text() -> str:
  """The content of its tokenizer.json."""
  inner = hf.Tokenizer(hf.models.WordPiece(VOCAB, unk_token='[UNK]'))
  inner.normalizer, inner.pre_tokenizer = hf.normalizers.BertNormalizer(), hf.pre_tokenizers.BertPreTokenizer()
  inner.decoder = hf.decoders.WordPiece()
  inner.add_special_tokens(SPECIAL)
  return inner.to_str()


def make() -> tokenizers.Tokenizer:
  return tokenizers.HFTokenizer(text())


def save(folder):
  """Writes it as a folder of BERT has it."""
  (folder / 'tokenizer.json').write_text(text())
  (folder / 'tokenizer_config.json').write_text(json.dumps({
      'tokenizer_class': 'BertTokenizer', 'cls_token': '[CLS]', 'sep_token': '[SEP]', 'mask_token': '[MASK]'}))
