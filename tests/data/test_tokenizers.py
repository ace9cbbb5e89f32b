"""Tokenizers give text back, never add special tokens, and know how many bytes each token stands for."""

import json
import math

import numpy as np
import pytest

from lns_jax.data import tokenizer_kinds, tokenizers
from lns_jax.errors import UserError
from tokenizer_cases import CORPUS, LIKE_LLAMA, TEXT, sentencepiece_model


@pytest.fixture(scope='module', params=['bpe', 'byte', 'sentencepiece', 'llama'])
def tokenizer(request, tmp_path_factory):
  if request.param == 'bpe':
    return tokenizers.train_bpe(CORPUS, 400)
  if request.param == 'byte':
    return tokenizers.byte_tokenizer()
  path = tmp_path_factory.mktemp('sp') / 'my.model'
  path.write_bytes(sentencepiece_model(**LIKE_LLAMA if request.param == 'llama' else {}))
  return tokenizers.load(path)


def test_the_same_texts_give_the_same_bpe():
  first, second = (tokenizers.train_bpe(CORPUS, 300) for _ in range(2))
  assert first.hash == second.hash
  assert first.hash != tokenizers.train_bpe(CORPUS, 301).hash
  assert first.hash != tokenizers.train_bpe([*CORPUS, 'x z' * 50], 300).hash


def test_text_comes_back():
  for made in (tokenizers.train_bpe(CORPUS, 400), tokenizers.byte_tokenizer()):
    assert made.decode(made.encode(TEXT)) == TEXT
    assert made.vocab_size <= 400


def test_ids_are_int32_below_the_vocabulary_without_special_tokens(tokenizer):
  ids = tokenizer.encode(TEXT)
  assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < tokenizer.vocab_size
  assert tokenizer.bos_id not in ids and tokenizer.eos_id not in ids  # known fault S3: BOS is added once, elsewhere


def test_text_that_spells_a_special_token_is_text():
  for made in (tokenizers.train_bpe(CORPUS, 400), tokenizers.byte_tokenizer()):
    ids = made.encode('a<eos>b<bos>')
    assert made.eos_id not in ids and made.bos_id not in ids
    assert made.decode(ids) == 'a<eos>b<bos>'


def test_token_bytes_sum_to_the_bytes_of_the_text(tokenizer):
  text = 'so it is and so it was in 東京'
  extra = isinstance(tokenizer, tokenizers.SentencePieceTokenizer)  # it puts a space before the text
  assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,) and tokenizer.token_bytes.dtype == np.int32
  assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode()) + extra
  assert tokenizer.token_bytes[tokenizer.bos_id] == tokenizer.token_bytes[tokenizer.eos_id] == 0


def test_bits_per_byte_of_a_known_loss():
  # known fault V4: 4 tokens, 10 bytes, 10.3734912 nats a token are 5.986314 bits a byte
  made = tokenizers.train_bpe(['abc abc abc abc ab ab'] * 9, 262)
  ids = made.encode('abc abc ab')  # 'abc', ' abc', ' ab'
  assert made.token_bytes[ids].sum() == 10
  assert 4 * math.log(32000) / math.log(2) / made.token_bytes[ids].sum() == pytest.approx(5.986314, abs=1e-6)


def test_pieces_of_a_long_document_have_the_ids_of_the_whole(tokenizer, monkeypatch):
  whole = tokenizer.encode(TEXT * 20).tolist()
  for size, step in ((64, 7), (100, 1000), (333, 50)):
    monkeypatch.setattr(tokenizer_kinds, 'PIECE_CHARS', size)
    chunks = [(TEXT * 20)[i:i + step] for i in range(0, len(TEXT * 20), step)]
    pieces = list(tokenizer.pieces(chunks))
    assert len(pieces) > 3 and max(map(len, pieces)) <= size
    assert np.concatenate(tokenizer.encode_batch(pieces)).tolist() == whole


def test_a_run_without_a_space_is_cut_too(tokenizer, monkeypatch):
  monkeypatch.setattr(tokenizer_kinds, 'PIECE_CHARS', 10)
  assert list(tokenizer.pieces(['a' * 25])) == ['a' * 10, 'a' * 10, 'a' * 5]
  assert list(tokenizer.pieces(['a' * 10])) == ['a' * 10]
  assert list(tokenizer.pieces([''])) == ['']


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
  tokenizer.save(tmp_path / 'new')
  again = tokenizers.load(tmp_path / 'new')
  assert again.hash == tokenizer.hash
  assert (again.vocab_size, again.bos_id, again.eos_id) == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
  assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
  np.testing.assert_array_equal(again.token_bytes, tokenizer.token_bytes)


def test_the_byte_tokenizer_is_utf8():
  assert tokenizers.byte_tokenizer().encode(TEXT).tolist() == list(TEXT.encode())
  assert (tokenizers.byte_tokenizer().bos_id, tokenizers.byte_tokenizer().eos_id) == (256, 257)


def test_padding_and_truncation_saved_in_a_tokenizer_file_are_off(tmp_path):
  made = tokenizers.byte_tokenizer()
  made._inner.enable_truncation(4)
  made._inner.enable_padding(length=9)
  (tmp_path / 'tokenizer.json').write_text(made._inner.to_str())
  assert len(tokenizers.load(tmp_path / 'tokenizer.json').encode('abcdefg')) == 7


def test_a_config_that_says_there_is_no_bos_is_believed(tmp_path):
  tokenizers.byte_tokenizer().save(tmp_path)
  config = tmp_path / 'tokenizer_config.json'
  for bos, found in ((None, None), ('<bos>', 256), ({'content': '<eos>'}, 257)):
    config.write_text(json.dumps({'bos_token': bos, 'eos_token': '<eos>'}))
    loaded = tokenizers.load(tmp_path)
    assert (loaded.bos_id, loaded.eos_id) == (found, 257)
    loaded.save(tmp_path / 'again')
    assert tokenizers.load(tmp_path / 'again').hash == loaded.hash
  config.write_text(json.dumps({'bos_token': '<s>'}))
  with pytest.raises(UserError, match="special token '<s>' is not in its vocabulary"):
    tokenizers.load(tmp_path)


def test_mistakes_are_one_sentence(tmp_path):
  (tmp_path / 'tokenizer.json').write_text('{"no": 1}')
  (tmp_path / 'bad.model').write_bytes(b'nothing')
  (tmp_path / 'empty').mkdir()
  for call, words in (
      (lambda: tokenizers.load(tmp_path / 'tokenizer.json'), ['tokenizer.json', 'not a tokenizer']),
      (lambda: tokenizers.load(tmp_path / 'bad.model'), ['bad.model', 'not a tokenizer']),
      (lambda: tokenizers.load(tmp_path / 'empty'), ['empty', 'neither']),
      (lambda: tokenizers.load('bpee'), ["'bpee'", 'bpe']),
      (lambda: tokenizers.train_bpe(CORPUS, 100), ['100', '258']),
      (lambda: tokenizers.check_vocab(tokenizers.byte_tokenizer(), 200), ['258', '200'])):
    with pytest.raises(UserError) as error:
      call()
    assert all(w in str(error.value) for w in words) and '\n' not in str(error.value), error.value
  tokenizers.check_vocab(tokenizers.byte_tokenizer(), 258)
