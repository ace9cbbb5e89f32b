"""Files of multiple-choice questions: which tokens are the choice's, what is cut, what is refused."""

import json

import numpy as np
import pytest

from lns_jax.data import choices, tokenizers
from lns_jax.errors import UserError

BYTES = tokenizers.byte_tokenizer()  # ids 0..255 are the bytes, 256 is BOS


def read(tmp_path, *records, tokenizer=BYTES, T=64, bos=256):
  path = tmp_path / 'q.jsonl'
  path.write_text(''.join((r if isinstance(r, str) else json.dumps(r)) + '\n' for r in records))
  return choices.read(path, tokenizer, T, bos=bos)


def question(context='ab', options=('c', 'de'), answer=0):
  return {'context': context, 'choices': list(options), 'answer': answer}


def spelled(row):
  """(what the model reads, what it is scored on)."""
  size, scored = int(row['segment_ids'].sum()), row['weights'] > 0
  return bytes(int(i) % 256 for i in row['tokens'][:size]), bytes(int(i) for i in row['targets'][scored])


@pytest.mark.parametrize('context, choice, read_, scored', [
    ('ab', 'c', b'\0ab ', b' c'),
    ('ab ', 'c', b'\0ab ', b' c'),  # white space at the end of a context is the choice's
    ('ab\n  ', 'c', b'\0ab\n  ', b'\n  c'),
    ('ab', ' c', b'\0ab ', b' c'),  # and is not doubled
    ('', 'c', b'\0', b'c')])
def test_the_choice_is_what_follows_the_context(tmp_path, context, choice, read_, scored):
  found = read(tmp_path, question(context, [choice, 'x']))
  assert spelled(found.rows[0]) == (read_, scored)
  row = found.rows[0]
  size = int(row['segment_ids'].sum())
  np.testing.assert_array_equal(row['tokens'][1:size], row['targets'][:size - 1])


def test_where_tokens_join_words_the_choice_has_the_tokens_of_the_whole_text(tmp_path):
  text = 'the cat sat on the mat and the dog sat on the log ' * 20
  bpe = tokenizers.train_bpe([text], 280)
  found = read(tmp_path, question('the cat sat', ['on the mat', 'log']), tokenizer=bpe, bos=None)
  whole, context = bpe.encode('the cat sat on the mat'), bpe.encode('the cat sat')
  row = found.rows[0]
  np.testing.assert_array_equal(row['tokens'][:len(whole) - 1], whole[:-1])
  np.testing.assert_array_equal(row['targets'][row['weights'] > 0], whole[len(context):])
  assert bpe.decode(row['targets'][row['weights'] > 0]) == ' on the mat'


def test_questions_of_different_length_share_one_shape(tmp_path):
  found = read(tmp_path, question('ab', ['c', 'defg'], 1), question('a', ['b', 'c', 'd'], 2))
  assert len(found) == 2 and found.choices == 3 and len(found.rows) == 6
  assert {row['tokens'].shape for row in found.rows} == {(7,)}  # BOS, 'ab', ' defg', less the last
  assert [float(row['right']) for row in found.rows] == [0, 1, 0, 0, 0, 1]
  assert [float(row['weights'].sum()) for row in found.rows] == [2, 5, 0, 2, 2, 2]
  assert found.rows[2]['segment_ids'].sum() == 0 and found.chance == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_the_layouts_of_hugging_face_sets(tmp_path):
  found = read(tmp_path, {'question': 'Q?', 'choices': {'text': ['x', 'y'], 'label': ['A', 'B']}, 'answerKey': 'B'},
               {'question': 'Q?', 'choices': ['x', 'y'], 'answer': 1})
  for own in (found.rows[:2], found.rows[2:]):
    assert spelled(own[1]) == (b'\0Question: Q?\nAnswer: ', b' y') and [float(r['right']) for r in own] == [0, 1]


def test_the_left_of_a_long_row_is_cut_and_counted(tmp_path):
  found = read(tmp_path, question('0123456789', ['abc', 'd']), question('01', ['abc', 'd']), T=6)
  assert found.cut == 1  # a question, not each of its rows
  assert spelled(found.rows[0]) == (b'789 ab', b' abc') and spelled(found.rows[1]) == (b'56789 ', b' d')
  assert spelled(found.rows[2]) == (b'\x0001 ab', b' abc')
  assert spelled(read(tmp_path, question('01', ['abcde', 'd']), T=6).rows[0]) == (b'1 abcd', b' abcde')


def test_all_that_decides_the_rows_decides_the_hash(tmp_path):
  a, *others = (read(tmp_path, question()), read(tmp_path, question(), T=63), read(tmp_path, question(), bos=None),
                read(tmp_path, question(answer=1)),
                read(tmp_path, question(), tokenizer=tokenizers.train_bpe(['ab'], 258)))
  assert a.hash == read(tmp_path, question()).hash and a.hash not in {b.hash for b in others}
  assert [a.file_hash == b.file_hash for b in others] == [True, True, False, True]


@pytest.mark.parametrize('line, words', [
    ('{"context": ', 'line 2 is not a JSON object'),
    ('[1]', 'line 2 is not a JSON object but list'),
    ({'choices': ['a', 'b'], 'answer': 0}, "line 2 has no field 'context' or 'question'"),
    ({'context': 'x', 'choice': ['a', 'b'], 'answer': 0}, "line 2 has no field 'choices'."),
    ({'context': 'x', 'choices': ['a', 'b']}, "line 2 has no field 'answer' or 'answerKey'"),
    ({'context': 'x', 'choices': {'text': ['a', 'b']}, 'answerKey': 'A'}, "line 2 has no field 'label'"),
    ({'context': 'x', 'choices': {'text': ['a', 'b'], 'label': ['A']}, 'answerKey': 'A'}, 'line 2.*as many labels'),
    ({'context': 'x', 'choices': {'text': ['a', 'b'], 'label': ['A', 'B']}, 'answerKey': 'C'}, "line 2: answerKey 'C'"),
    (question(context=3), "line 2: 'context' is not text but int"),
    (question(options=['a', 3]), 'line 2: the choices are not a list of texts'),
    (question(options=['a', '\ud800']), 'line 2: the choices are not a list of texts'),
    (question(options=['a']), 'line 2 has 1 choices'),
    (question(answer=2), r'line 2: answer 2 is none of the 2 choices, whose numbers are 0\.\.1'),
    (question(answer=-1), 'line 2: answer -1 is none'),
    (question(answer=True), 'line 2: answer True is none'),
    (question(answer='B'), "line 2: answer 'B' is none"),
    (question(options=['a', 'b' * 64]), 'line 2: choice 2 has 65 tokens, and the model reads 64'),
    (question(context='', options=['a', '']), 'line 2: choice 2 adds no token')])
def test_a_faulty_line_is_named_in_one_sentence(tmp_path, line, words):
  with pytest.raises(UserError, match=words) as error:
    read(tmp_path, question(), line)
  assert str(tmp_path / 'q.jsonl') in str(error.value) and '\n' not in str(error.value)


def test_what_is_no_file_of_questions_is_refused(tmp_path):
  with pytest.raises(UserError, match='holds no questions'):
    read(tmp_path, '', '  ')
  with pytest.raises(UserError, match='cannot be read'):
    choices.read(tmp_path / 'none.jsonl', BYTES, 8, bos=None)
  with pytest.raises(UserError, match='line 1 has no context, and the model knows no token'):
    read(tmp_path, question(context=''), bos=None)
