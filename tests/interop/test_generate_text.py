"""Text as it is written: whole characters, no stop strings, rows in turn."""

import pytest

from lns_jax import UserError
from lns_jax.data import tokenizers
from lns_jax.interop import generate_text

BYTES = tokenizers.byte_tokenizer()


def shown(text, prompt='', stops=()):
  """What each byte of a text brings, and what the end does."""
  row = generate_text.Text(BYTES, BYTES.encode(prompt).tolist(), stops)
  return [row.add(int(token)) for token in BYTES.encode(text)], row.end(), row


def test_no_half_character_is_shown():
  pieces, rest, row = shown('aé\u3042\U0001f600z')
  assert pieces == ['a', '', 'é', '', '', '\u3042', '', '', '', '\U0001f600', 'z'] and rest == ''
  assert row.text == 'aé\u3042\U0001f600z'


def test_a_character_that_never_ends_is_shown_at_the_end():
  row = generate_text.Text(BYTES, [])
  assert [row.add(t) for t in 'aé'.encode()[:2]] == ['a', ''] and row.end() == '\ufffd'


def test_a_stop_string_is_held_back_and_cut():
  pieces, rest, row = shown('one\n\ntwo', stops=['\n\n', 'x'])
  assert pieces == ['o', 'n', 'e', '', '', '', '', ''] and rest == '' and row.text == 'one' and row.ended
  pieces, rest, _ = shown('one\n', stops=['\n\n'])
  assert pieces == ['o', 'n', 'e', ''] and rest == '\n'
  pieces, _, _ = shown('a\nb', stops=['\n\n'])
  assert pieces == ['a', '', '\nb']


def test_a_sentencepiece_space_between_prompt_and_text_stays(tmp_path):
  sentencepiece = pytest.importorskip('sentencepiece')
  (tmp_path / 't.txt').write_text('so it is and so it was and it is so\n' * 50)
  sentencepiece.SentencePieceTrainer.train(
      input=str(tmp_path / 't.txt'), model_prefix=str(tmp_path / 'm'), vocab_size=24, hard_vocab_limit=False,
      minloglevel=2)
  tokenizer = tokenizers.load(tmp_path / 'm.model')
  ids = tokenizer.encode('so it is').tolist()
  cut = len(tokenizer.encode('so').tolist())
  row = generate_text.Text(tokenizer, ids[:cut])
  assert ''.join([row.add(t) for t in ids[cut:]]) + row.end() == ' it is'


def test_rows_are_shown_one_after_the_other():
  found = []
  turn = generate_text.InTurn(3, found.append)
  turn.add(1, 'b1')
  turn.add(0, 'a1')
  turn.close(1)
  turn.add(2, 'c1')
  turn.add(0, 'a2')
  assert found == ['a1', 'a2']
  turn.close(0)
  assert found == ['a1', 'a2', '\n', 'b1', '\n', 'c1']
  turn.close(2)
  assert ''.join(found) == 'a1a2\nb1\nc1\n'


def test_what_is_loaded_is_said_before(tmp_path, capsys):
  with pytest.raises(UserError, match='nothing'):
    generate_text.write(tmp_path / 'none', ['a'], max_new=1)
  assert capsys.readouterr().err == f'loading {tmp_path}/none\n'
