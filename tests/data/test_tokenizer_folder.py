"""A tokenizer is what all files of its model's folder say."""

import json

import pytest
from tokenizers import Tokenizer, processors

from lns_jax.data import tokenizers
from lns_jax.errors import UserError
from tokenizer_cases import LIKE_LLAMA, TEXT, sentencepiece_model


def write(folder, **contents):
  """JSON files by name."""
  for name, content in contents.items():
    (folder / f'{name}.json').write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
  """A tokenizer.json of bytes, with <bos> 256 and <eos> 257, and nothing else."""
  (tmp_path / 'tokenizer.json').write_text(tokenizers.byte_tokenizer()._inner.to_str())
  return tmp_path


def with_bos_template(folder):
  """Has the tokenizer.json put <bos> before a text, as Llama 3's does."""
  inner = Tokenizer.from_file(str(folder / 'tokenizer.json'))
  inner.post_processor = processors.TemplateProcessing(single='<bos> $A', special_tokens=[('<bos>', 256)])
  inner.save(str(folder / 'tokenizer.json'))


def test_bos_is_put_where_the_post_processor_or_the_config_says(folder):
  assert not tokenizers.load(folder).adds_bos
  write(folder, tokenizer_config={'add_bos_token': True})  # seen with transformers 5: the class does not read it
  assert not tokenizers.load(folder).adds_bos
  write(folder, tokenizer_config={'add_bos_token': True, 'tokenizer_class': 'LlamaTokenizerFast'})
  assert tokenizers.load(folder).adds_bos
  with_bos_template(folder)
  for config, expected in (
      ({}, True), ({'add_bos_token': False}, True), ({'add_bos_token': None}, True), ({'bos_token': None}, False),
      ({'add_bos_token': False, 'tokenizer_class': 'LlamaTokenizer'}, False)):
    write(folder, tokenizer_config=config)
    assert tokenizers.load(folder).adds_bos is expected, config


def test_a_saved_tokenizer_puts_bos_as_before(folder):
  # Whoever reads the file without us does as its post-processor says.
  for bos in (True, False):
    write(folder, tokenizer_config={'add_bos_token': bos, 'tokenizer_class': 'LlamaTokenizerFast'})
    tokenizer = tokenizers.load(folder)
    tokenizer.save(folder / 'saved')
    again = tokenizers.load(folder / 'saved')
    assert (again.adds_bos, again.hash) == (bos, tokenizer.hash)
    assert Tokenizer.from_file(str(folder / 'saved/tokenizer.json')).encode('a').ids == [256] * bos + [97]
    with_bos_template(folder)


@pytest.mark.parametrize('kind', ['json', 'sentencepiece'])
def test_with_bos_changes_that_alone_and_is_kept_in_the_files(kind, tmp_path):
  if kind == 'json':
    made = tokenizers.byte_tokenizer()
  else:
    made = tokenizers.SentencePieceTokenizer(sentencepiece_model(), eos_ids=[7], added={420: ('<end>', True)})
  for adds_bos in (True, False, True):
    changed = made.with_bos(adds_bos)
    changed.save(tmp_path)
    for found in (changed, tokenizers.load(tmp_path)):
      assert found.adds_bos is adds_bos and found.encode(TEXT).tolist() == made.encode(TEXT).tolist()
      for name in ('name', 'vocab_size', 'bos_id', 'eos_id', 'eos_ids'):
        assert getattr(found, name) == getattr(made, name), name


def test_a_post_processor_that_puts_more_than_bos_is_kept(folder):
  inner = Tokenizer.from_file(str(folder / 'tokenizer.json'))
  inner.post_processor = processors.TemplateProcessing(
      single='<bos> $A <eos>', special_tokens=[('<bos>', 256), ('<eos>', 257)])
  inner.save(str(folder / 'tokenizer.json'))
  made = tokenizers.load(folder)
  assert made.with_bos(True).text == made.text
  assert Tokenizer.from_str(made.with_bos(False).text).encode('a').ids == [97]


def test_bos_is_never_in_the_ids(folder):
  with_bos_template(folder)
  tokenizer = tokenizers.load(folder)
  assert tokenizer.adds_bos and tokenizer.encode('ab').tolist() == [97, 98]
  assert tokenizer.encode('<bos>ab', special=True).tolist() == [256, 97, 98]
  assert tokenizer.encode('<bos>').tolist() == list(b'<bos>')


def test_ends_of_a_text_come_from_four_files(folder):
  assert (tokenizers.load(folder).eos_id, tokenizers.load(folder).eos_ids) == (257, (257,))
  write(folder, config={'eos_token_id': 65, 'bos_token_id': 66})
  made = tokenizers.load(folder)
  assert (made.bos_id, made.eos_id, made.eos_ids) == (66, 65, (65,))
  write(folder, generation_config={'eos_token_id': [67, 257]})
  assert tokenizers.load(folder).eos_ids == (67, 257)
  write(folder, special_tokens_map={'eos_token': {'content': '<eos>'}, 'bos_token': '<bos>'})
  made = tokenizers.load(folder)
  assert (made.bos_id, made.eos_id, made.eos_ids) == (256, 257, (257, 67))
  write(folder, tokenizer_config={'eos_token': '<bos>', 'bos_token': None})
  made = tokenizers.load(folder)
  assert (made.bos_id, made.eos_id, made.eos_ids) == (None, 256, (256, 67, 257))
  made.save(folder / 'saved')
  again = tokenizers.load(folder / 'saved')
  assert (again.bos_id, again.eos_id, again.eos_ids) == (None, 256, (256, 67, 257))


def test_gpt2_as_vocab_and_merges(tmp_path):
  made = json.loads(tokenizers.train_bpe([TEXT * 9], 300)._inner.to_str())['model']
  vocab = {token: i for i, token in enumerate([t for t in made['vocab'] if t not in ('<bos>', '<eos>')])}
  vocab['<|endoftext|>'] = len(vocab)
  write(tmp_path, vocab=vocab)
  (tmp_path / 'merges.txt').write_text('\n'.join(['#version: 0.2', *map(' '.join, made['merges'])]) + '\n')
  tokenizer = tokenizers.load(tmp_path)
  two_more = tokenizers.train_bpe([TEXT * 9], 300)  # the same, after <bos> and <eos>
  assert tokenizer.encode(TEXT).tolist() == [i - 2 for i in two_more.encode(TEXT)]
  end = vocab['<|endoftext|>']
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos, tokenizer.vocab_size) == (end, end, False, end + 1)
  assert end not in tokenizer.encode('a<|endoftext|>')
  write(tmp_path, tokenizer_config={'tokenizer_class': 'Qwen2TokenizerFast', 'eos_token': '<|endoftext|>'})
  tokenizer = tokenizers.load(tmp_path)
  assert (tokenizer.bos_id, tokenizer.eos_id) == (None, end)
  assert tokenizer.encode('cafe\u0301').tolist() == tokenizer.encode('café').tolist()
  write(tmp_path, tokenizer_config={'tokenizer_class': 'CLIPTokenizer'})
  with pytest.raises(UserError, match='CLIPTokenizer'):
    tokenizers.load(tmp_path)


def test_added_tokens_have_their_own_ids(folder):
  write(folder, tokenizer_config={'added_tokens_decoder': {
      '256': {'content': '<bos>', 'special': True}, '258': {'content': '<|user|>', 'special': True},
      '259': {'content': '東京', 'special': False}}})
  tokenizer = tokenizers.load(folder)
  assert tokenizer.vocab_size == 260 and tokenizer.encode('a 東京').tolist() == [97, 32, 259]
  assert tokenizer.encode('<|user|>').tolist() == list(b'<|user|>')
  assert tokenizer.encode('<|user|>a', special=True).tolist() == [258, 97]
  assert tokenizer.token_bytes[[258, 259]].tolist() == [0, 6]
  assert tokenizer.decode([258, 259]) == '東京'
  tokenizer.save(folder / 'saved')
  assert tokenizers.load(folder / 'saved').hash == tokenizer.hash
  write(folder, tokenizer_config={'added_tokens_decoder': {'300': {'content': '<|user|>', 'special': True}}})
  with pytest.raises(UserError, match='300'):
    tokenizers.load(folder)


@pytest.fixture
def llama(tmp_path):
  (tmp_path / 'tokenizer.model').write_bytes(sentencepiece_model(**LIKE_LLAMA))
  return tmp_path


def test_a_bare_model_is_llamas(llama):
  tokenizer = tokenizers.load(llama)
  assert tokenizer.adds_bos and (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
  assert tokenizer.encode('so').tolist() == tokenizer._inner.encode('so')
  assert tokenizer._inner.id_to_piece(int(tokenizer.encode('so')[0])).startswith('\u2581')
  for config, expected in (({'tokenizer_class': 'LlamaTokenizer'}, True), ({'tokenizer_class': 'T5Tokenizer'}, False),
                           ({'tokenizer_class': 'LlamaTokenizer', 'add_bos_token': False}, False),
                           ({'bos_token': None}, False)):
    write(llama, tokenizer_config=config)
    assert tokenizers.load(llama).adds_bos is expected, config


def test_tokens_added_to_a_model_file(llama):
  size = tokenizers.load(llama).vocab_size
  write(llama, added_tokens={'<pad>': size, '<pause>': size + 1}, special_tokens_map={'pad_token': '<pad>'},
        tokenizer_config={'eos_token': '<pad>'})
  tokenizer = tokenizers.load(llama)
  plain = tokenizer._inner.encode
  assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (size + 2, 1, size)
  assert tokenizer.encode('so<pause>it').tolist() == [*plain('so'), size + 1, *plain('it')]
  assert tokenizer.encode('so<pad>').tolist() == plain('so<pad>')
  assert tokenizer.encode('<s>so<pad>', special=True).tolist() == [1, *plain('so'), size]
  assert tokenizer.decode([1, *plain('so'), size + 1, size]) == 'so<pause>'
  assert tokenizer.token_bytes[size:].tolist() == [0, 7]
  tokenizer.save(llama / 'saved')
  again = tokenizers.load(llama / 'saved')
  assert again.hash == tokenizer.hash and again.encode('a<pause>').tolist() == tokenizer.encode('a<pause>').tolist()


def test_mistakes_name_the_file_and_the_token(folder, llama):
  for place, contents, words in (
      (folder, {'tokenizer_config': {'eos_token': '</s>'}}, ['tokenizer.json', "'</s>'"]),
      (llama, {'tokenizer_config': {'eos_token': '<none>'}}, ['tokenizer', "'<none>'"]),
      (folder, {'config': {'bos_token_id': 9999}, 'tokenizer_config': {}}, ['9999'])):
    write(place, **contents)
    with pytest.raises(UserError) as error:
      tokenizers.load(place)
    assert all(w in str(error.value) for w in words) and '\n' not in str(error.value), error.value


@pytest.mark.parametrize('name', ['tokenizer_config', 'special_tokens_map', 'generation_config', 'config'])
@pytest.mark.parametrize('text', ['', 'null', '[1]', '[' * 100_000])
def test_a_damaged_file_beside_the_vocabulary_is_the_one_that_is_named(name, text, folder):
  (folder / f'{name}.json').write_text(text)
  with pytest.raises(UserError, match=f'/{name}.json is not'):
    tokenizers.load(folder)


@pytest.mark.parametrize('name, contents, words', [
    ('tokenizer_config', {'bos_token': 5}, 'bos_token = 5'),
    ('tokenizer_config', {'eos_token': [1]}, r'eos_token = \[1\]'),
    ('special_tokens_map', {'eos_token': {'content': 7}}, 'eos_token = 7'),
    ('config', {'eos_token_id': [257, 'a']}, "'a'"), ('generation_config', {'eos_token_id': 257.0}, '257.0'),
    ('config', {'bos_token_id': 'x'}, "'x'")])
def test_a_special_token_of_a_wrong_type_is_named(name, contents, words, folder):
  write(folder, **{name: contents})
  with pytest.raises(UserError, match=words):
    tokenizers.load(folder)


def test_minus_one_is_no_end(folder):
  write(folder, config={'eos_token_id': -1})
  assert tokenizers.load(folder).eos_ids == (257,)
