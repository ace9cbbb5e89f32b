"""A model on the tasks of lm-eval, offline: from a path and names to accuracies."""

import contextlib
import logging
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import tqdm

from lns_jax import sharding
from lns_jax.config import DataConfig
from lns_jax.data import mmlu_dev, sources
from lns_jax.errors import UserError
from lns_jax.interop import text_rules
from lns_jax.interop import squad as squad_lib
from lns_jax.interop.load import load_in
from lns_jax.layers import param


def evaluate(path, tasks: Sequence[str], *, include_path: str = '', data_dir: str = '', num_fewshot: int | None = None,
             limit: int | None = None, batch_size: int = 0, seed: int = 0, dtype: str = '', scheme: str = '',
             add_bos: bool | None = None, max_length: int = 0) -> dict:
  """Scores a model on tasks of lm-eval. Nothing is downloaded.

  Args:
    path: what `lns_jax.load` opens.
    tasks: names that lm-eval knows; 'paper' for `eval_tasks.PAPER`; a name of `data.mmlu_dev.NAMES`; .jsonl files of
      questions as `data.choices` reads them.
    include_path: folder with YAML files of further tasks.
    data_dir: folder with copies of data sets, see `eval_tasks`.
    num_fewshot: examples before each question; as each task says by default.
    limit: questions of each task; all by default.
    batch_size, add_bos, max_length: as of `lm_eval.Model`.
    seed: of the examples and of what is drawn in generation.
    dtype, scheme: as of `lns_jax.load`.

  Returns:
    {'tasks': {name: {metric, metric + '_stderr', ..., 'questions', 'num_fewshot'}}, 'groups': the same of those that
    hold several tasks, 'reading': how the model was given its text, 'seconds'}.

  Raises:
    UserError: before the model is run, for names, data or a model that cannot be used.
  """
  start = time.perf_counter()
  os.environ.update(HF_DATASETS_OFFLINE='1', HF_HUB_OFFLINE='1', HF_DATASETS_DISABLE_PROGRESS_BARS='1')
  try:
    import lm_eval
  except ImportError as error:
    raise UserError(f"tasks need lm-eval, which cannot be imported ({error}): pip install 'lns_jax[eval]'.") from None
  from lns_jax.interop import eval_tasks
  from lns_jax.interop.lm_eval import Model
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  specs = [_spec(name) for task in tasks for name in (eval_tasks.PAPER if task == 'paper' else [task])]
  if not specs:
    raise UserError('--tasks is empty; paper names those of the paper, mmlu_dev one that needs no data.')
  for flag, given in (('include_path', include_path), ('data_dir', data_dir)):
    if given and not pathlib.Path(given).expanduser().is_dir():
      raise UserError(f'--{flag}={given} is not a folder.')
  with tempfile.TemporaryDirectory() as folder:
    manager = _manager(include_path, {spec for spec in specs if isinstance(spec, str)})
    built = eval_tasks.build(manager, specs, data_dir, num_fewshot, pathlib.Path(folder))
    config, params, tokenizer = load_in(dtype, path, scheme=scheme or None, sharding=sharding.share)
    model = Model(config, params, tokenizer, text_rules.of(path, config, tokenizer), add_bos=add_bos,
                  max_length=max_length, batch_size=batch_size, seed=seed)
    with contextlib.redirect_stdout(sys.stderr):  # lm-eval prints; stdout belongs to the result
      found = lm_eval.simple_evaluate(
          model=model, tasks=built, task_manager=manager, num_fewshot=num_fewshot, limit=limit, log_samples=False,
          bootstrap_iters=1000, random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed,
          fewshot_random_seed=seed)
  if jax.process_index() == 0:
    from lm_eval.utils import make_table
    print(make_table(found), file=sys.stderr, flush=True)
  return {'tasks': _numbers(found, 'results'), 'groups': _numbers(found, 'groups'),
          'reading': model.get_model_info() | {'dtype': str(param.dtypes(config)[1]), 'cut': model.cut},
          'seconds': time.perf_counter() - start}


def squad(path, file: str, *, batch_size: int = 0, dtype: str = '', limit: int | None = None) -> dict:
  """Answers of an encoder with model.head = squad to a file of the SQuAD v1.1 form.

  limit: first questions alone. Returns {'tasks': {'squad': {'exact_match', 'f1' in per cent, 'questions'}}, 'seconds'}.
  Raises UserError for another model or file.
  """
  start = time.perf_counter()
  questions = squad_lib.read(file)[:limit]
  config, params, tokenizer = load_in(dtype, path)
  if tokenizer is None:
    raise UserError(f'{path} has no tokenizer, without which no question can be read.')
  with tqdm.tqdm(total=len(questions), desc='squad', unit='question', mininterval=0.5, dynamic_ncols=True,
                 disable=jax.process_index() != 0) as bar:
    answers = squad_lib.predict(config, params, tokenizer, questions, batch_size=batch_size or 16,
                                progress=lambda done, of: bar.update(done - bar.n))
  return {'tasks': {'squad': squad_lib.scores(answers, questions)}, 'seconds': time.perf_counter() - start}


def _spec(name: str) -> str | dict:
  """What lm-eval's manager loads for a name."""
  from lns_jax.interop import eval_tasks
  if name in mmlu_dev.NAMES:
    name = str(mmlu_dev.file(name, sources.cache_folder(DataConfig())))
  return eval_tasks.from_questions(name) if name.endswith('.jsonl') else name


def _manager(include_path: str, names: set[str]):
  """lm-eval's index of tasks; its own are read only for names that `include_path` does not know: it takes seconds."""
  from lm_eval.tasks import TaskManager
  folder = str(pathlib.Path(include_path).expanduser()) if include_path else None
  manager = TaskManager(include_path=folder, include_defaults=False)
  return manager if names <= set(manager.all_tasks) else TaskManager(include_path=folder)


def _numbers(found: dict, kind: str) -> dict[str, dict]:
  """{name: {metric: number}}; a filter other than lm-eval's default 'none' stands behind the metric's name."""
  result = {}
  for name, metrics in found.get(kind, {}).items():
    if kind == 'results' and name in found.get('groups', {}):
      continue
    own = {key.removesuffix(',none'): value for key, value in metrics.items() if isinstance(value, (int, float))
           and not isinstance(value, bool) and ',' in key}
    samples = found.get('n-samples', {}).get(name, {})
    result[name] = own | ({'questions': samples['effective']} if samples else {}) | (
        {'num_fewshot': found['n-shot'][name]} if name in found.get('n-shot', {}) else {})
  return result
