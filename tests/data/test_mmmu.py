"""Questions about pictures: what a line means, what a model reads of it, and what is refused."""

import json

import numpy as np
import pytest
import tokenizers as tokenizers_lib

from lns_jax.data import mmmu, pictures, tokenizers
from lns_jax.errors import UserError

PICTURE = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3)
PROCESSOR = pictures.Processor(patch_size=2, frames=1, min_pixels=16, max_pixels=64)
IDS = mmmu.Ids(300, 301, 302)
LINE = {'question': 'What?', 'options': ['a', 'b', 'c'], 'answer': 'B', 'images': ['p.png']}


@pytest.fixture
def write(tmp_path):
  from PIL import Image
  Image.fromarray(PICTURE).save(tmp_path / 'p.png')
  def write(*lines):
    (tmp_path / 'items.jsonl').write_text('\n'.join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return tmp_path / 'items.jsonl'
  return write


def test_options_may_be_text_and_open_questions_are_left_out(write):
  read = mmmu.read(write(LINE, LINE | {'options': "['a', 'b']"}, '', LINE | {'question_type': 'open'}))
  assert [item.options for item in read.items] == [['a', 'b', 'c'], ['a', 'b']] and read.skipped == 1
  assert [item.answer for item in read.items] == [1, 1] and read.chance == pytest.approx(5 / 12)
  assert read.items[0].pictures == [write().parent / 'p.png'] and read.items[1].place.endswith('line 2')


def test_pictures_stand_where_they_are_named_and_the_others_first():
  item = mmmu.Item('', 'Is <image 2> it?', ['<image 2>', 'no'], 0, [PICTURE, PICTURE])
  assert mmmu.text(item) == f'<image 1>Is <image 2> it?\nA. <image 2>\nB. no\n{mmmu.REQUEST}'


def test_plain_text_asks_for_an_answer(write):
  tokenizer = tokenizers.byte_tokenizer()
  found = mmmu.prompt(mmmu.Item('', 'So <image 1>?', ['x', 'y'], 1, [PICTURE]), tokenizer, PROCESSOR, IDS)
  parts = ['So ', [300, 301, 301, 302], f'?\nA. x\nB. y\n{mmmu.REQUEST}\nAnswer:']  # 4 x 8 pixels are 1 x 2 cells
  expected = np.concatenate([tokenizer.encode(p) if isinstance(p, str) else p for p in parts])
  np.testing.assert_array_equal(found.tokens, expected)
  np.testing.assert_array_equal(found.grid_thw, [[1, 2, 4]])
  np.testing.assert_array_equal(found.patches, PROCESSOR.patches(PICTURE)[0])
  assert found.letters.tolist() == [tokenizer.encode('A')[0], tokenizer.encode('B')[0]] and found.answer == 1


def chat_tokenizer():
  """Bytes and the marks of a chat."""
  inner = tokenizers_lib.Tokenizer.from_str(tokenizers.byte_tokenizer().text)
  inner.add_special_tokens(['<|im_start|>', '<|im_end|>'])
  return tokenizers.HFTokenizer(inner.to_str())


def test_a_tokenizer_with_the_marks_of_a_chat_gets_its_form():
  tokenizer = chat_tokenizer()
  (begin,), (end,) = (tokenizer.encode(mark, special=True) for mark in ('<|im_start|>', '<|im_end|>'))
  found = mmmu.prompt(mmmu.Item('', 'So?', ['x', 'y'], 1, []), tokenizer, PROCESSOR, IDS)
  encode = lambda text: tokenizer.encode(text).tolist()
  assert found.tokens.tolist() == [
      begin, *encode(f'system\n{mmmu.SYSTEM}'), end, *encode('\n'), begin,
      *encode(f'user\nSo?\nA. x\nB. y\n{mmmu.REQUEST}'), end, *encode('\n'), begin, *encode('assistant\n')]
  assert found.patches.shape == (0, 12) and found.grid_thw.shape == (0, 3)


@pytest.mark.parametrize('line, words', [
    ('{', ['line 1', 'JSON', '"answer": "B"']),
    ({'options': ['a', 'b'], 'answer': 'A'}, ['no question']),
    (LINE | {'options': ['a']}, ['options', '2 to 10']),
    (LINE | {'options': 'a or b'}, ['options are no list']),
    (LINE | {'answer': 'D'}, ["'D'", 'A, B, C']),
    (LINE | {'answer': 'AB'}, ["'AB'", 'A, B, C']),
    (LINE | {'answer': 1}, ['answer = 1']),
    (LINE | {'images': [1]}, ['images must be']),
    (LINE | {'images': ['q.png']}, ['line 1', 'no picture at', 'q.png']),
    (LINE | {'question': 'Is <image 2> it?'}, ['<image 2>', '1 images']),
    (LINE | {'question_type': 'open'}, ['no question with options']),
])
def test_a_line_that_is_no_question_is_refused(write, line, words):
  with pytest.raises(UserError) as e:
    mmmu.read(write(line))
  assert all(w in str(e.value) for w in words), e.value


def test_a_file_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(UserError, match='cannot be read'):
    mmmu.read(tmp_path / 'none.jsonl')
