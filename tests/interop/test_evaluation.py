"""Tasks of lm-eval without a network: data from files, first tokens, what is said where data are missing."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors import numpy as safetensors

import hf_folders
import lns_jax
import wordpiece
from lns_jax.config import ModelConfig
from lns_jax.errors import UserError

pytest.importorskip('lm_eval')
from lns_jax.interop import evaluation  # noqa: E402

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope='module', autouse=True)
def caches(tmp_path_factory):
  """Its library writes what it has read of a file into a cache of its own, which is not to be the user's."""
  os.environ.update(HF_HOME=str(tmp_path_factory.mktemp('hf')), HF_DATASETS_OFFLINE='1', HF_HUB_OFFLINE='1')
  import datasets
  datasets.config.HF_DATASETS_CACHE = os.environ['HF_HOME']


@pytest.fixture(scope='module', autouse=True)
def index():
  """The package's own tasks, whose files take seconds to read, are read once."""
  from lm_eval.tasks import _index
  build, known = _index.TaskIndex.build, {}
  def once(paths, **kwargs):
    key = tuple(map(str, paths))
    if key not in known:
      known[key] = build(paths, **kwargs)
    return {name: dataclasses.replace(entry) for name, entry in known[key].items()}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(_index.TaskIndex, 'build', staticmethod(once))
    yield


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return hf_folders.of_text(tmp_path_factory.mktemp('models'), max_position_embeddings=512)


def lines(path, records):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return path


def without_head(path):
  """The folder with a head of zeros: every token is as likely as any other."""
  tensors = safetensors.load_file(path / 'model.safetensors')
  tensors['lm_head.weight'] *= 0
  safetensors.save_file(tensors, path / 'model.safetensors')
  return path


def test_perplexities_of_a_task_made_of_files(tmp_path):
  """Known fault V4: 4 tokens, 10 bytes, 2 words, uniform over 32000."""
  path = hf_folders.of_text(tmp_path, tokenizer=hf_folders.words())
  config = json.loads((path / 'config.json').read_text()) | {'vocab_size': 32000}
  tensors = safetensors.load_file(path / 'model.safetensors')
  for name in ('lm_head.weight', 'model.embed_tokens.weight'):
    tensors[name] = np.zeros((32000, 24), np.float32)
  safetensors.save_file(tensors, path / 'model.safetensors')
  (path / 'config.json').write_text(json.dumps(config))
  data = lines(tmp_path / 'text.jsonl', [{'text': 'abcd efghi'}] * 3)
  (tmp_path / 'tasks').mkdir()
  (tmp_path / 'tasks' / 'mine.yaml').write_text(f"""
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{{{text}}}}'
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
""")
  found = evaluation.evaluate(path, ['mine'], include_path=str(tmp_path / 'tasks'))['tasks']['mine']
  assert found['bits_per_byte'] == pytest.approx(5.986314, abs=1e-6)
  assert found['byte_perplexity'] == pytest.approx(2 ** 5.986314, rel=1e-5)
  assert found['word_perplexity'] == pytest.approx(32000 ** 2, rel=1e-5) and found['questions'] == 3
  assert 4 * math.log(32000) == pytest.approx(4 * 10.3734912)


def test_a_file_of_questions_and_the_questions_of_the_package(folder, tmp_path):
  own = lines(tmp_path / 'own.jsonl', [{'context': f'{i}', 'choices': ['a', 'b'], 'answer': i % 2} for i in range(9)])
  found = evaluation.evaluate(folder, [str(own), 'mmlu_dev'], limit=7)
  assert found['tasks'].keys() == {'own', 'mmlu_dev'}
  for task in found['tasks'].values():
    assert task['questions'] == 7 and task['num_fewshot'] == 0
    assert 7 * task['acc'] == pytest.approx(round(7 * task['acc']))
    assert task['acc_stderr'] == pytest.approx(math.sqrt(task['acc'] * (1 - task['acc']) / 6))
  assert found['reading']['adds_bos'] is False and found['reading']['max_length'] == 512
  assert found['reading']['bos_id'] is None and found['reading']['tokenizer'] == 'byte'


@pytest.mark.slow
def test_copies_of_data_sets_by_task_and_as_on_the_hub(folder, tmp_path):
  """A model of which every choice is equally likely takes the first, or of unequal lengths the shortest."""
  folder = without_head(hf_folders.of_text(tmp_path, max_position_embeddings=512))
  lines(tmp_path / 'data' / 'boolq' / 'validation.jsonl',
        [{'passage': 'p', 'question': f'q{i}', 'label': int(i < 2)} for i in range(8)])  # 'no' is shorter: 6 of 8
  parquet = tmp_path / 'data' / 'allenai' / 'ai2_arc' / 'ARC-Easy' / 'test-00000-of-00001.parquet'
  parquet.parent.mkdir(parents=True)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(
      [{'question': 'q', 'choices': {'text': ['x', 'y', 'z'], 'label': ['A', 'B', 'C']}, 'answerKey': key}
       for key in 'ABCA']), parquet)
  for split, rows in (('test', 5), ('dev', 2)):
    for subject in ('anatomy', 'virology'):
      lines(tmp_path / 'data' / 'cais' / 'mmlu' / subject / f'{split}.jsonl',
            [{'question': 'q', 'choices': list('wxyz'), 'answer': i % 4} for i in range(rows)])
  found = evaluation.evaluate(folder, ['boolq', 'arc_easy', 'mmlu_anatomy'], data_dir=str(tmp_path / 'data'))['tasks']
  assert found['boolq']['acc'] == 6 / 8 and found['arc_easy']['acc'] == 2 / 4 and found['mmlu_anatomy']['acc'] == 2 / 5
  assert found['boolq']['questions'] == 8
  shots = evaluation.evaluate(folder, ['mmlu_virology'], data_dir=str(tmp_path / 'data'), num_fewshot=2)
  assert shots['tasks']['mmlu_virology']['num_fewshot'] == 2
  with pytest.raises(UserError, match=r"task boolq reads the split 'train', which .*boolq has not; it has validation"):
    evaluation.evaluate(folder, ['boolq'], data_dir=str(tmp_path / 'data'), num_fewshot=2)
  with pytest.raises(UserError, match=r'task mmlu_abstract_algebra cannot be opened; they are in none of .*'
                                      r'data/mmlu_abstract_algebra, .*data/cais/mmlu/abstract_algebra: '):
    evaluation.evaluate(folder, ['mmlu'], data_dir=str(tmp_path / 'data'))


def test_a_group_is_averaged_over_its_questions(folder, tmp_path):
  lines(tmp_path / 'd' / 'one' / 'test.jsonl', [{'q': 'a', 'right': 0}] * 3)
  lines(tmp_path / 'd' / 'two' / 'test.jsonl', [{'q': 'a', 'right': 1}])
  (tmp_path / 'tasks').mkdir()
  for name in ('one', 'two'):
    (tmp_path / 'tasks' / f'{name}.yaml').write_text(
        f'task: {name}\ndataset_path: someone/{name}\ntest_split: test\noutput_type: multiple_choice\n'
        'doc_to_text: "{{q}}"\ndoc_to_choice: [x, xxxx]\ndoc_to_target: right\ntarget_delimiter: ""\n')
  (tmp_path / 'tasks' / 'both.yaml').write_text(
      'group: both\ntask: [one, two]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n')
  folder = without_head(hf_folders.of_text(tmp_path))
  found = evaluation.evaluate(folder, ['both'], include_path=str(tmp_path / 'tasks'), data_dir=str(tmp_path / 'd'))
  assert found['groups']['both']['acc'] == 3 / 4
  assert {name: t['acc'] for name, t in found['tasks'].items()} == {'one': 1, 'two': 0}


@pytest.mark.parametrize('tasks, kwargs, words', [
    (['arc_eazy'], {}, "no task 'arc_eazy'; it has arc_easy, "),
    (['piqa'], {}, 'data of task piqa cannot be opened, without --data_dir, in the cache of the library `datasets`: '),
    (['/nowhere.jsonl'], {}, 'nowhere.jsonl cannot be read'),
    ([], {}, '--tasks is empty; paper names'),
    (['boolq'], {'data_dir': '/nowhere'}, '--data_dir=/nowhere is not a folder'),
    (['boolq'], {'include_path': '/nowhere'}, '--include_path=/nowhere is not a folder'),
])
def test_what_cannot_be_used_is_said_before_the_model_is_opened(tasks, kwargs, words, monkeypatch):
  monkeypatch.setattr(evaluation, 'load_in', lambda *a, **k: pytest.fail('the model was opened'))
  with pytest.raises(UserError, match=words):
    evaluation.evaluate('model', tasks, **kwargs)


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
  with pytest.raises(UserError, match='no tokenizer'):
    evaluation.evaluate(hf_folders.folder('llama', tmp_path), ['mmlu_dev'])
  with pytest.raises(UserError, match='family vit gives no log-likelihoods'):
    evaluation.evaluate(hf_folders.folder('vit', tmp_path), ['mmlu_dev'])


def test_an_encoder_answers_a_file_of_squad(tmp_path, monkeypatch):
  tokenizer = wordpiece.make()
  config = ModelConfig(
      family='encoder', causal=False, scheme='post', norm='layernorm', bias='all', mlp='gelu', head='squad',
      vocab_size=tokenizer.vocab_size, max_positions=384, d_model=8, d_ff=16, num_layers=1, num_heads=2)
  context = 'The Sun is big. It rises in the MORNING, and sets at night!'
  asked = [{'id': str(i), 'question': 'When?', 'answers': [{'text': 'night', 'answer_start': 53}]} for i in range(3)]
  file = tmp_path / 'squad.json'
  file.write_text(json.dumps({'data': [{'title': 'T', 'paragraphs': [{'context': context, 'qas': asked}]}]}))
  model = config, lns_jax.init(config, jax.random.key(0)), tokenizer
  monkeypatch.setattr(evaluation, 'load_in', lambda dtype, path: model)
  found = evaluation.squad('bert', str(file), limit=2)['tasks']['squad']
  assert found['questions'] == 2 and found.keys() == {'exact_match', 'f1', 'questions'}
  with pytest.raises(UserError, match='none.json cannot be read'):
    evaluation.squad('bert', str(tmp_path / 'none.json'))


def test_the_command(folder, tmp_path):
  """A table on stderr, JSON at the end; what a task imports is not what lies beside the command."""
  data = lines(tmp_path / 'data.jsonl', [{'q': 'x', 'right': i % 2} for i in range(4)])
  (tmp_path / 'utils.py').write_text('import evaluate\n\n\ndef right(doc):\n  assert evaluate.load\n  return doc["right"]\n')
  (tmp_path / 'mine.yaml').write_text(
      f'task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n'
      'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: [a, b]\ndoc_to_target: !function utils.right\n')
  run = subprocess.run(
      [sys.executable, str(ROOT / 'experiments' / 'evaluate_tasks.py'), f'--model={folder}', '--tasks=mine',
       f'--include_path={tmp_path}', '--noadd_bos'], capture_output=True, text=True, timeout=120, cwd='/')
  assert run.returncode == 0, run.stderr
  assert '|mine ' in run.stderr and len(run.stdout.splitlines()) == 1
  assert json.loads(run.stdout)['tasks']['mine']['acc'] == 0.5


def test_a_task_of_ours_is_among_the_names_that_are_near():
  with pytest.raises(UserError, match='mmlu_dev'):
    evaluation.evaluate('model', ['mmlu_def'])
