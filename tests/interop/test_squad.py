"""SQuAD: scores of the official script by hand, windows, answers as they stand in the text, and a loss for them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lns_jax import depth
from lns_jax.config import ModelConfig
from lns_jax.data import tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import squad
from lns_jax.models import transformer
import wordpiece

TOKENIZER = wordpiece.make()
CONTEXT = 'The Sun is big.  It rises in the MORNING, and sets at night!'
CONFIG = ModelConfig(
    family='encoder', causal=False, scheme='post', norm='layernorm', bias='all', mlp='gelu', head='squad',
    vocab_size=TOKENIZER.vocab_size, max_positions=48, d_model=8, d_ff=16, num_layers=2, num_heads=2,
    precision='float32')


def question(text='When was it?', answer='the MORNING', context=CONTEXT, id='q1', more=()):
  return squad.Question(id, text, context, ((answer, context.index(answer)), *((a, context.index(a)) for a in more)))


def write(path, *questions):
  qas = [{'id': q.id, 'question': q.text, 'answers': [{'text': t, 'answer_start': at} for t, at in q.answers]}
         for q in questions]
  path.write_text(json.dumps({'version': '1.1', 'data': [
      {'title': 'T', 'paragraphs': [{'context': questions[0].context, 'qas': qas}]}]}))
  return path


# --- the official scores


@pytest.mark.parametrize('answer, reference, exact, f1', [
    ('The sun', 'sun', 1, 1), ('sun.', 'a SUN', 1, 1), ('the big sun', 'the sun', 0, 2 / 3),
    ('sun and moon', 'the moon and the stars', 0, 2 / 3), ('red', 'blue', 0, 0), ('', 'sun', 0, 0),
    ("the U.S.A. team's", 'USA teams', 1, 1), ('sun sun', 'sun', 0, 2 / 3), ('theatre', 'the atre', 0, 0),
    ('an  apple', 'apple', 1, 1), ('another', 'an other', 0, 0)])
def test_scores_by_hand(answer, reference, exact, f1):
  assert squad.exact(answer, reference) == exact
  assert squad.f1(answer, reference) == pytest.approx(f1)


def test_the_best_reference_of_each_question_counts():
  questions = [question(id='a', answer='MORNING', more=('night',)),
               question(id='b', answer='Sun', more=('The Sun is big',))]
  found = squad.scores({'a': 'at night', 'b': 'big sun'}, questions)
  # a: 'at night' against 'night': F1 2/3. b: against 'sun' 2/3, against 'sun is big' 2*2/(2+3) = 0.8.
  assert found == {'exact_match': 0, 'f1': pytest.approx(100 * (2 / 3 + 0.8) / 2), 'questions': 2}


# --- the file


def test_a_file_is_read(tmp_path):
  path = write(tmp_path / 'a.json', question(more=('night',)), question(id='q2'))
  first, second = squad.read(path)
  assert first == question(more=('night',)) and second.id == 'q2' and first.answers[0] == ('the MORNING', 29)


@pytest.mark.parametrize('content, words', [
    ('nonsense', 'SQuAD v1.1 form'),
    ('{"data": [{"paragraphs": [{"qas": [{"id": 1, "question": "q"}]}]}]}', "SQuAD v1.1 form .KeyError: 'context'"),
    ('{"data": []}', 'holds no question'),
    ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "x7", "question": "q", "answers": []}]}]}]}',
     'question x7 has no answer, as in SQuAD 2.0')])
def test_other_files_are_refused(tmp_path, content, words):
  (tmp_path / 'a.json').write_text(content)
  with pytest.raises(UserError, match=words):
    squad.read(tmp_path / 'a.json')


# --- windows


def test_a_row_is_cls_question_sep_context_sep():
  w, = squad.windows([question()], TOKENIZER, 48, 8)
  q, c = TOKENIZER.encode('When was it?'), TOKENIZER.encode(CONTEXT)
  n = 3 + len(q) + len(c)
  np.testing.assert_array_equal(w.row['tokens'][:n], [2, *q, 3, *c, 3])
  np.testing.assert_array_equal(w.row['segment_ids'], np.arange(48) < n)
  at = np.arange(48)
  np.testing.assert_array_equal(w.row['token_types'], (at >= len(q) + 2) & (at < n))
  np.testing.assert_array_equal(w.row['weights'], (at >= len(q) + 2) & (at < n - 1))
  words = [CONTEXT[a:b] for a, b in w.spans[w.row['weights'] > 0]]
  assert words[:5] == ['The', 'Sun', 'is', 'big', '.'] and 'MORNING' in words  # characters of the text itself


def test_windows_overlap_and_cover_the_context():
  q, c = TOKENIZER.encode('When was it?'), TOKENIZER.encode(CONTEXT)
  T, stride = len(q) + 3 + 10, 4
  found = list(squad.windows([question()], TOKENIZER, T, stride))
  parts = [w.row['tokens'][w.row['weights'] > 0] for w in found]
  for i, part in enumerate(parts):
    np.testing.assert_array_equal(part, c[i * stride:i * stride + 10])
  assert (len(parts) - 1) * stride + 10 >= len(c) > (len(parts) - 2) * stride + 10
  with pytest.raises(UserError, match='fewer than the stride of 11'):
    list(squad.windows([question()], TOKENIZER, T, 11))


def test_rows_of_a_loss_hold_the_answer():
  w, = squad.windows([question()], TOKENIZER, 48, 8)
  row, = squad.rows([question()], TOKENIZER, 48, 8)
  first, last = row['labels']
  assert CONTEXT[w.spans[first, 0]:w.spans[last, 1]] == 'the MORNING'
  # Windows of 5 tokens begin at 0, 4, 8 and 12; the answer is tokens 8 and 9.
  few = len(TOKENIZER.encode('When was it?')) + 3 + 5
  narrow, = squad.rows([question()], TOKENIZER, few, 4)
  np.testing.assert_array_equal(narrow['labels'] - few + 6, [0, 1])


# --- answers


def test_the_best_pair_is_the_largest_sum_in_order_and_not_too_long():
  may = np.array([False, True, True, True, True])
  start, end = np.array([9., 1, 5, 0, 6]), np.array([9., 7, 0, 3, 1])
  # Position 0 may not answer; (2, 1) and (4, 1) run backwards: of the others (1, 1) and (2, 3) give 8, (4, 4) 7.
  assert squad.best_span(start, end, may) == (8.0, 1, 1)
  assert squad.best_span(start + [0, 0, 1, 0, 0], end, may) == (9.0, 2, 3)
  long = np.zeros(40)
  long[0], far = 5, np.zeros(40)
  far[squad.MAX_ANSWER] = 5
  assert squad.best_span(long, far, np.ones(40, bool))[1:] != (0, squad.MAX_ANSWER)
  assert squad.best_span(long, np.roll(far, -1), np.ones(40, bool)) == (10.0, 0, squad.MAX_ANSWER - 1)


def pointing(word: str):
  """Parameters of a model whose start and end logits are high on one word alone."""
  params = jax.tree.map(jnp.zeros_like, transformer.init(CONFIG, jax.random.key(0)))
  params['embed']['table'] = params['embed']['table'].at[wordpiece.VOCAB[word], 0].set(1.0)
  layers = params['layers'].values()
  for norm in (params['embed_norm'], *(layer[f'{sub}_out_norm'] for layer in layers for sub in ('attn', 'mlp'))):
    norm['gain'] = jnp.ones_like(norm['gain'])
  params['head']['span'] = params['head']['span'].at[:, 0].set(1.0)
  return params


@pytest.mark.parametrize('word, answer', [('morning', 'MORNING'), ('big', 'big'), ('night', 'night')])
@pytest.mark.parametrize('T, stride', [(48, 8), (16, 4)])
def test_a_model_that_points_at_a_word_answers_it(tmp_path, word, answer, T, stride):
  other = question(id='q2', text=f'What is {word}?', answer='The Sun')
  path = write(tmp_path / 'a.json', question(answer=answer), other)
  params = pointing(word)  # the word in the question is no answer
  answers = squad.predict(CONFIG, params, TOKENIZER, squad.read(path), T=T, stride=stride, batch_size=3)
  assert answers == {'q1': answer, 'q2': answer}
  assert squad.scores(answers, squad.read(path)) == {'exact_match': 50.0, 'f1': 50.0, 'questions': 2}


def test_removing_layers_takes_the_loss_of_the_rows():
  params = transformer.init(CONFIG, jax.random.key(0))
  row, = squad.rows([question()], TOKENIZER, 48, 8)
  batch = {k: np.stack([v, v]) for k, v in row.items()}
  found = depth.layer_drop(CONFIG, params, [batch])
  may = row['weights'].sum()
  assert found['baseline'].value == pytest.approx(np.log(may), abs=0.5) and np.isfinite(found['layer_drop'].value).all()


def test_refusals():
  params = transformer.init(CONFIG, jax.random.key(0))
  with pytest.raises(UserError, match='model.head = squad'):
    squad.predict(ModelConfig(), {}, TOKENIZER, [question()])
  with pytest.raises(UserError, match='tokenizer plain does not say which characters'):
    squad.predict(CONFIG, params, NoSpans(), [question()], T=48, stride=8)
  with pytest.raises(UserError, match='model.max_positions = 48'):
    squad.predict(CONFIG, params, TOKENIZER, [question()], T=64, stride=8)


class NoSpans(tokenizers.Tokenizer):
  """A tokenizer that knows no characters, as SentencePiece's."""

  name, vocab_size, bos_id, eos_id, hash = 'plain', 9, 1, 2, ''

  def encode_batch(self, texts, *, special=False):
    return [np.zeros(3, np.int32) for _ in texts]

  def decode(self, ids):
    return ''

  def save(self, folder):
    pass

  def with_bos(self, adds_bos):
    return self

  def _bytes_of(self, token):
    return 1
