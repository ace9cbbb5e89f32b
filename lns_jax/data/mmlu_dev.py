"""Real questions without a download: MMLU's development set, which the lm-eval package carries as worked examples.

Hendrycks et al., arXiv 2009.03300: five questions of each of 57 subjects. One, to which the package has added a fifth
choice, is left out. 281 questions tell an accuracy within 5 points, and models have been trained on them: they show
what a change of a model does, not how good it is.
"""

import importlib.util
import json
import pathlib
import re

from lns_jax import files
from lns_jax.errors import UserError

NAMES = {'mmlu_dev': 'the letter of the answer, as MMLU is scored', 'mmlu_dev_texts': 'the words of the answer'}

_WORKED = re.compile(r"(?P<question>.*?)\s*\(A\)(?P<A>.*?)\(B\)(?P<B>.*?)\(C\)(?P<C>.*?)\(D\)(?P<D>.*?)\nA: "
                     r".*[Tt]he answer is \((?P<answer>[A-D])\)\.?\s*", re.DOTALL)


def write(path, name: str) -> None:
  """Writes the questions as `lns_jax.data.choices` reads them, one JSON object a line.

  Args:
    name: one of NAMES: the choices are letters, behind the question and its choices as in MMLU's own prompt; or their
      texts, behind the question alone, which says more of a small model.

  Raises:
    UserError: lm-eval is not installed, or its file holds other questions than expected.
  """
  records = []
  for subject, text in json.loads(_source().read_text(encoding='utf-8')).items():
    for worked in re.split(r'(?:^|\n)Q: ', text)[1:]:
      found = _WORKED.fullmatch(worked)
      if found:
        records.append(_record(found, subject, name))
  if len(records) != 281:
    raise UserError(f'this version of lm-eval holds {len(records)} MMLU questions of the known form, not 281; '
                    'lm-eval 0.4.13 has them.')
  files.write_text(pathlib.Path(path), ''.join(json.dumps(r, ensure_ascii=False) + '\n' for r in records))


def file(name: str, folder) -> pathlib.Path:
  """The file of that name in a folder, written anew."""
  path = pathlib.Path(folder) / f'{name}.jsonl'
  path.parent.mkdir(parents=True, exist_ok=True)
  write(path, name)
  return path


def _source() -> pathlib.Path:
  package = importlib.util.find_spec('lm_eval')
  if package is None:
    raise UserError("the MMLU questions come with lm-eval, which is not installed: pip install 'lns_jax[eval]'.")
  path = pathlib.Path(package.submodule_search_locations[0]) / 'tasks/mmlu/flan_cot_fewshot/_cot_prompts.json'
  if not path.is_file():
    raise UserError(f'{path} is not there, which lm-eval 0.4.13 has.')
  return path


def _record(found: re.Match, subject: str, name: str) -> dict:
  texts = [found[letter].strip() for letter in 'ABCD']
  answer, question = 'ABCD'.index(found['answer']), found['question'].strip()
  if name == 'mmlu_dev_texts':
    return {'subject': subject, 'context': f'Question: {question}\nAnswer:', 'choices': texts, 'answer': answer}
  listed = ''.join(f'\n{letter}. {text}' for letter, text in zip('ABCD', texts))
  about = f'The following are multiple choice questions (with answers) about {subject.replace("_", " ")}.\n\n'
  return {'subject': subject, 'context': f'{about}{question}{listed}\nAnswer:', 'choices': list('ABCD'),
          'answer': answer}
