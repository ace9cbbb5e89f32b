"""The questions inside the lm-eval package, as a file of questions."""

import json

import pytest

from lns_jax.data import choices, mmlu_dev, tokenizers
from lns_jax.errors import UserError

pytest.importorskip('lm_eval')


def records(name, tmp_path):
  return [json.loads(line) for line in mmlu_dev.file(name, tmp_path).read_text().splitlines()]


def test_the_first_question_as_mmlu_puts_it(tmp_path):
  first, *others = records('mmlu_dev', tmp_path)
  assert first == {
      'subject': 'abstract_algebra', 'choices': ['A', 'B', 'C', 'D'], 'answer': 2,
      'context': 'The following are multiple choice questions (with answers) about abstract algebra.\n\n'
                 'Statement 1 | Every element of a group generates a cyclic subgroup of the group. Statement 2 | The '
                 'symmetric group S_10 has 10 elements.\nA. True, True\nB. False, False\nC. True, False\nD. False, True'
                 '\nAnswer:'}
  assert len(others) == 280 and len({r['subject'] for r in others}) == 57


def test_words_in_place_of_letters(tmp_path):
  letters, words = records('mmlu_dev', tmp_path), records('mmlu_dev_texts', tmp_path)
  assert words[0]['choices'] == ['True, True', 'False, False', 'True, False', 'False, True']
  assert words[0]['context'].startswith('Question: Statement 1') and words[0]['context'].endswith('elements.\nAnswer:')
  for a, b in zip(letters, words, strict=True):
    assert a['answer'] == b['answer'] and all(f'\n{x}. {text}' in a['context'] for x, text in zip('ABCD', b['choices']))
    assert "think step by step" not in a['context'] + b['context'] and all(b['choices'])


def test_they_are_read_as_any_file_of_questions(tmp_path):
  found = choices.read(mmlu_dev.file('mmlu_dev', tmp_path), tokenizers.byte_tokenizer(), 4096, bos=256)
  assert (len(found), found.choices, found.chance, found.cut) == (281, 4, 0.25, 0)
  assert all(row['weights'].sum() == 2 for row in found.rows)  # a space and a letter


def test_another_version_of_the_package_is_refused(tmp_path, monkeypatch):
  (tmp_path / 'other.json').write_text(json.dumps({'anatomy': 'Q: what\n(A) a (B) b (C) c (D) d\nA: The answer is (B).'}))
  monkeypatch.setattr(mmlu_dev, '_source', lambda: tmp_path / 'other.json')
  with pytest.raises(UserError, match='holds 1 MMLU questions of the known form, not 281'):
    mmlu_dev.write(tmp_path / 'x.jsonl', 'mmlu_dev')
  assert not (tmp_path / 'x.jsonl').exists()
