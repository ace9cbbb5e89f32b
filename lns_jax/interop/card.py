"""README.md of an exported model: what it is, how it was trained as far as its run says, how to load it."""

import math
import re

LOADING = '''```python
from transformers import {auto}{and_tokenizer}

model = {auto}.from_pretrained('{name}')
{tokenizer}```

```python
import lns_jax

config, params, tokenizer = lns_jax.load('{name}')
```
'''
TASKS = {'AutoModelForCausalLM': 'text-generation', 'AutoModelForImageClassification': 'image-classification',
         'AutoModelForMaskedLM': 'fill-mask', 'AutoModelForQuestionAnswering': 'question-answering',
         'AutoModel': 'feature-extraction'}


def text(name: str, *, model_type: str, auto: str, has_tokenizer: bool, scheme: str, scaled: list[str],
         facts: dict) -> str:
  """The model card.

  Args:
    name: of the folder.
    auto: class of transformers that opens it.
    scaled: tensors that have taken a factor of the scheme.
    facts: {what: number or words} of the model and its training; those that are None are left out.
  """
  task = TASKS[auto]
  tags = dict.fromkeys(['lns_jax', model_type, scheme.replace('_', '-')])
  head = ['---', 'license: unknown', 'library_name: transformers', f'pipeline_tag: {task}', 'tags:',
          *(f'- {tag}' for tag in tags), '---']
  rows = [f'| {what} | {_shown(value)} |' for what, value in facts.items() if value is not None]
  tokenizer = f"tokenizer = AutoTokenizer.from_pretrained('{name}')\n" if has_tokenizer else ''
  loading = LOADING.format(auto=auto, name=name, tokenizer=tokenizer, and_tokenizer=', AutoTokenizer' * has_tokenizer)
  return '\n'.join([*head, '', f'# {name}', '', _placement(model_type, scheme, scaled), '', '| | |', '|---|---|', *rows,
                    '', '## Loading', '', loading])


def _placement(model_type: str, scheme: str, scaled: list[str]) -> str:
  """How the model was normalised, and where the factors are now."""
  said = f'A plain `{model_type}` model, written by lns_jax; its norm placement in training is `{scheme}`.'
  if not scaled:
    return said
  kinds = dict.fromkeys(re.sub(r'\.\d+\.', '.*.', tensor) for tensor in scaled)
  return (f'{said} The factors of that placement, each by the own index of its layer, have been multiplied into '
          f"{', '.join(f'`{kind}`' for kind in kinds)}: they must not be applied again. `lns_jax.load` knows this from "
          '`config.json` and takes fixed factors out again, to train on with them.')


def _shown(value) -> str:
  if isinstance(value, float):
    return f'{value:.4g}' if math.isfinite(value) else 'not finite'
  return f'{value:,}' if isinstance(value, int) else str(value).replace('|', '\\|')
