"""The tokenizer in a GGUF file gives the ids of the one that it was made from."""

import importlib.util
import json
import pathlib

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gguf_files import fields, tensors, write
from lns_jax.data import byte_bpe, tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import gguf as ours
from tokenizer_cases import CORPUS, LIKE_LLAMA, sentencepiece_model

TEXT = ("The naïve café — “déjà vu” of 東京, 12345 times; it's HE'LL  two\n\n  def f(x):\n\t return x ** -0.5 \t# 🙂"
        '\r\n x²½ ٣٤ <bos>end ')
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def opened(path, values: dict):
  whole = {f'tokenizer.ggml.{key}': value for key, value in values.items()}
  return ours.GGUFWeights(write(path, 'llama', fields('llama_gqa') | whole, tensors('llama_gqa'))).tokenizer()


def bpe_fields(pre: str | None = 'gpt-2', **changes) -> dict:
  """A trained byte-level BPE of about 400 tokens, as GGUF has it, with a token of its own and a row of padding."""
  made = json.loads(tokenizers.train_bpe(CORPUS, 400)._inner.to_str())
  vocab = sorted(made['model']['vocab'], key=made['model']['vocab'].get)
  found = {'model': 'gpt2', 'pre': pre, 'tokens': [*vocab, '🙂🙂', '[PAD9]'],
           'token_type': [CONTROL, CONTROL, *[NORMAL] * (len(vocab) - 2), USER_DEFINED, UNUSED],
           'merges': [' '.join(pair) for pair in made['model']['merges']], 'bos_token_id': 0, 'eos_token_id': 1}
  return {key: value for key, value in (found | changes).items() if value is not None}


def by_library(pre_tokenizer) -> Tokenizer:
  """The same vocabulary in the `tokenizers` library, split in the library's own words."""
  made = json.loads(tokenizers.train_bpe(CORPUS, 400)._inner.to_str())
  inner = Tokenizer(models.BPE(made['model']['vocab'], [tuple(m) for m in made['model']['merges']]))
  inner.pre_tokenizer, inner.decoder = pre_tokenizer, decoders.ByteLevel()
  return inner


@pytest.mark.parametrize('pre, splits', [
    ('gpt-2', [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    ('smollm', [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])])
def test_ids_are_those_of_the_librarys_own_splits(pre, splits, tmp_path):
  tokenizer = opened(tmp_path / 'm.gguf', bpe_fields(pre))
  assert tokenizer.encode(TEXT).tolist() == by_library(pre_tokenizers.Sequence(splits)).encode(TEXT).ids
  assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (0, 1, (1,), False)


WORDS = "I'Mx 12345 don't\n\n  x  <a>\r\ny"


@pytest.mark.parametrize('pre, expected', [  # by reading each pattern from left to right
    ('gpt-2', ['I', "'", 'Mx', ' 12345', ' don', "'t", '\n\n ', ' x', ' ', ' <', 'a', '>', '\r', '\n', 'y']),
    ('smollm', ['I', "'", 'Mx', ' ', '1', '2', '3', '4', '5', ' don', "'t", '\n\n ', ' x', ' ', ' <', 'a', '>', '\r',
                '\n', 'y']),
    ('llama-bpe', ['I', "'M", 'x', ' ', '123', '45', ' don', "'t", '\n\n', ' ', ' x', ' ', ' <', 'a', '>\r\n', 'y']),
    ('qwen2', ['I', "'M", 'x', ' ', '1', '2', '3', '4', '5', ' don', "'t", '\n\n', ' ', ' x', ' ', ' <', 'a', '>\r\n', 'y']),
    ('deepseek-llm', ['I', "'", 'Mx', ' ', '12345', ' don', "'", 't', '\n', '\n', ' ', ' x', ' ', ' <', 'a', '>', '\r',
                      '\n', 'y']),
])
def test_where_known_models_cut_a_text(pre, expected):
  inner = byte_bpe.build({c: i for i, c in enumerate(byte_bpe.alphabet())}, [], byte_bpe.SPLITS[pre])
  pieces = inner.pre_tokenizer.pre_tokenize_str(WORDS)
  assert [WORDS[a:b] for _, (a, b) in pieces] == expected


def test_every_split_is_known_by_what_it_does():
  vocab = {c: i for i, c in enumerate(byte_bpe.alphabet())}
  for name, cut in byte_bpe.SPLITS.items():
    found = byte_bpe.SPLITS[byte_bpe.name_of(byte_bpe.build(vocab, [], cut))]
    assert (found.patterns, found.nfc, found.whole) == (cut.patterns, cut.nfc, cut.whole), name
  other = byte_bpe.build(vocab, [])
  other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
  assert byte_bpe.name_of(other) is None


def test_llama3_takes_a_word_of_the_vocabulary_whole(tmp_path):
  values = bpe_fields('llama-bpe')
  values['tokens'][-1], values['token_type'][-1] = 'zqx', NORMAL
  word = len(values['tokens']) - 1
  assert opened(tmp_path / 'llama3.gguf', values).encode('zqx').tolist() == [word]
  assert len(opened(tmp_path / 'qwen2.gguf', values | {'pre': 'qwen2'}).encode('zqx')) == 3  # there is no merge to it


def test_special_tokens_are_text_unless_asked_for(tmp_path):
  tokenizer = opened(tmp_path / 'm.gguf', bpe_fields())
  assert 0 not in tokenizer.encode(TEXT)
  assert tokenizer.encode('<bos>so<eos>', special=True).tolist() == [0, *tokenizer.encode('so'), 1]
  assert tokenizer.decode(tokenizer.encode('<bos>so<eos>', special=True)) == 'so'


def test_tokens_above_the_vocabulary(tmp_path):
  values = bpe_fields()
  tokenizer = opened(tmp_path / 'm.gguf', values)
  smile = len(values['tokens']) - 2
  assert smile in tokenizer.encode('a 🙂🙂 b') and tokenizer.decode([smile]) == '🙂🙂'
  assert tokenizer.token_bytes[smile] == 8
  assert tokenizer.vocab_size == smile + 1  # rows that only pad the embedding are no tokens
  assert tokenizer.encode('[PAD9]').max() < smile


def test_bos_is_as_the_file_says(tmp_path):
  for number, (values, expected) in enumerate((
      (bpe_fields('llama-bpe'), True), (bpe_fields('llama-bpe', add_bos_token=False), False),
      (bpe_fields('qwen2', add_bos_token=True), True), (bpe_fields('llama-bpe', bos_token_id=None), False))):
    assert opened(tmp_path / f'{number}.gguf', values).adds_bos is expected


def test_a_turns_end_is_an_end_too(tmp_path):
  tokenizer = opened(tmp_path / 'm.gguf', bpe_fields(eot_token_id=7))
  assert (tokenizer.eos_id, tokenizer.eos_ids) == (1, (1, 7))


@pytest.mark.parametrize('llama', [False, True])
def test_a_saved_tokenizer_is_the_same(llama, tmp_path):
  tokenizer = opened(tmp_path / 'm.gguf', sentencepiece_fields()[0] if llama else bpe_fields('smollm', eot_token_id=7))
  tokenizer.save(tmp_path / 'saved')
  again = tokenizers.load(tmp_path / 'saved')
  for name in ('hash', 'name', 'vocab_size', 'bos_id', 'eos_id', 'eos_ids', 'adds_bos'):
    assert getattr(again, name) == getattr(tokenizer, name), name
  assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def sentencepiece_fields(proto: bytes | None = None, **changes):
  """(fields of a GGUF file, the SentencePiece processor that they are from)."""
  sp = sentencepiece.SentencePieceProcessor(model_proto=proto or sentencepiece_model(**LIKE_LLAMA))
  ids = range(sp.vocab_size())
  kinds = [UNKNOWN if sp.is_unknown(i) else CONTROL if sp.is_control(i) else BYTE if sp.is_byte(i) else NORMAL
           for i in ids]
  found = {'model': 'llama', 'tokens': [sp.id_to_piece(i) for i in ids], 'scores': [sp.get_score(i) for i in ids],
           'token_type': kinds, 'bos_token_id': sp.bos_id(), 'eos_token_id': sp.eos_id(),
           'unknown_token_id': sp.unk_id()}
  return found | changes, sp


def test_sentencepiece_gives_the_ids_of_its_model(tmp_path):
  values, sp = sentencepiece_fields()
  tokenizer = opened(tmp_path / 'm.gguf', values)
  for text in (TEXT, ' leading', 'two  spaces', '', '\n'):
    assert tokenizer.encode(text).tolist() == sp.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == sp.decode(sp.encode(text))
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (sp.bos_id(), sp.eos_id(), True)
  bare = opened(tmp_path / 'bare.gguf', values | {'add_space_prefix': False, 'add_bos_token': False})
  assert bare.encode('so').tolist() != sp.encode('so') and not bare.adds_bos


def test_the_vocabulary_of_mistral(tmp_path):
  spec = importlib.util.find_spec('mistral_common')
  if spec is None:
    pytest.skip('needs the package mistral-common for its tokenizer.model.v1')
  file = pathlib.Path(spec.submodule_search_locations[0]) / 'data' / 'tokenizer.model.v1'
  values, sp = sentencepiece_fields(file.read_bytes())
  tokenizer = opened(tmp_path / 'm.gguf', values)
  assert tokenizer.vocab_size == 32000
  assert tokenizer.encode(TEXT).tolist() == sp.encode(TEXT)
  assert tokenizer.encode('<s>[INST] so', special=True).tolist() == [1, *sp.encode('[INST] so')]


def test_what_is_not_known_is_refused_by_name(tmp_path):
  for values, words in (
      (bpe_fields('smollmm'), ["'smollmm'", 'smollm']), (bpe_fields(None), ['tokenizer.ggml.pre']),
      (bpe_fields(model='rwkv'), ["'rwkv'", 'gpt2']), (bpe_fields(eos_token_id=4000), ['eos_token_id = 4000']),
      (bpe_fields(merges=['a b c']), ["'a b c'"]), (bpe_fields(token_type=[1, 1]), ['cannot be read'])):
    with pytest.raises(UserError) as error:
      opened(tmp_path / 'm.gguf', values)
    assert all(w in str(error.value) for w in [*words, 'm.gguf']) and '\n' not in str(error.value), error.value
  assert opened(tmp_path / 'm.gguf', {}) is None


def test_types_are_those_of_the_library():
  assert [gguf.TokenType[n] for n in ('NORMAL', 'UNKNOWN', 'CONTROL', 'USER_DEFINED', 'UNUSED', 'BYTE')] == [
      NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE]
