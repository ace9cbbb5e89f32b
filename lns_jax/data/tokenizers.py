"""Tokenizers: byte-level BPE trained here, bytes, and those of files and folders that others made."""

import pathlib
from collections.abc import Iterable

from lns_jax.data import byte_bpe, tokenizer_folder
from lns_jax.data.tokenizer_base import PIECE_CHARS, Tokenizer
from lns_jax.data.tokenizer_hf import HFTokenizer
from lns_jax.data.tokenizer_sentencepiece import SentencePieceTokenizer
from lns_jax.errors import UserError

# Enough text for any vocabulary up to 32k; more changes little and costs seconds.
BPE_TRAINING_BYTES = 16_000_000
# Part of the fingerprint of prepared data: raise it when training changes its result.
BPE_RULE = 'byte-level BPE, GPT-2 split, rule 1'
BOS, EOS = '<bos>', '<eos>'


def train_bpe(texts: Iterable[str], vocab_size: int) -> HFTokenizer:
  """Trains a byte-level BPE with <bos> and <eos> on at most `BPE_TRAINING_BYTES` of text.

  The same texts give the same tokenizer. Little text gives fewer than `vocab_size` tokens.

  Raises:
    UserError: if vocab_size has no room for the 256 bytes and two special tokens.
  """
  import tokenizers
  if vocab_size < 258:
    raise UserError(f'model.vocab_size = {vocab_size} is too small for a byte-level BPE; 258 would do.')
  inner = byte_bpe.build({}, [])
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
  inner = byte_bpe.build({char: byte for byte, char in enumerate(byte_bpe.alphabet())}, [], special=[BOS, EOS])
  return HFTokenizer(inner.to_str(), name='byte')


def is_in(folder) -> bool:
  """Whether a folder holds the file of a tokenizer."""
  return tokenizer_folder.find(pathlib.Path(folder)) is not None


def load(path) -> Tokenizer:
  """Reads a tokenizer from a folder, or from `tokenizer.json` or a SentencePiece `.model` with the files beside it.

  Of a folder, the first of these is it: tokenizer.json; tokenizer.model; vocab.json with merges.txt. Which tokens
  begin and end a text, and whether BOS is put before it, say tokenizer_config.json, special_tokens_map.json,
  generation_config.json and config.json, the first that does.

  Raises:
    UserError: if there is no such file, or it cannot be read.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    found = tokenizer_folder.find(path)
    if found is None:
      raise UserError(f'{path} holds neither tokenizer.json nor tokenizer.model nor vocab.json with merges.txt.')
    path = found
  if not path.is_file():
    raise UserError(f'there is no tokenizer at {str(path)!r}; give the file of the one whose tokens the model knows, '
                    'or, for a new model, bpe or byte.')
  try:
    facts = tokenizer_folder.facts(path)
    if path.suffix == '.model':
      return SentencePieceTokenizer(path.read_bytes(), **facts)
    text = tokenizer_folder.from_vocab(path) if path.name == 'vocab.json' else path.read_text(encoding='utf-8')
    return HFTokenizer(text, **facts)
  except UserError:
    raise
  except Exception as error:  # both libraries raise bare Exception or RuntimeError for a damaged file
    raise UserError(f'{path} is not a tokenizer that can be read: {_first_line(error)}.') from None


def _first_line(error: Exception) -> str:
  return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip('.')


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Refuses a tokenizer whose ids do not fit the model's vocabulary."""
  if tokenizer.vocab_size > vocab_size:
    raise UserError(f'tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens but model.vocab_size is '
                    f'{vocab_size}; set model.vocab_size = {tokenizer.vocab_size} or more.')
