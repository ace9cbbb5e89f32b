"""lm-eval's tasks with data on this machine: copies of data sets, files of questions, what is in its cache.

A copy of a data set lies below --data_dir under the task's name, or where the set lies on the Hugging Face Hub, so that
a download of its repository will do:

    boolq/validation.jsonl                     the name of the task
    aps/super_glue/boolq/validation-*.parquet  the repository and the name of the subset
    Rowan/hellaswag/data/validation-*.parquet  the repository, with or without `data`

A split is one file or more, called after it, of JSON, JSON Lines, Parquet or CSV, with the fields that the set has.
"""

import difflib
import glob
import pathlib
import re
from collections.abc import Iterator, Sequence

import yaml

from lns_jax.data import choices, mmlu_dev
from lns_jax.errors import UserError

PAPER = ('mmlu', 'boolq', 'arc_easy', 'piqa', 'hellaswag', 'openbookqa', 'winogrande')
FORMATS = {'.parquet': 'parquet', '.jsonl': 'json', '.json': 'json', '.csv': 'csv'}
SPLITS = ('training_split', 'validation_split', 'test_split', 'fewshot_split')


def from_questions(path: str) -> dict:
  """A task over a file of questions as `lns_jax.data.choices` reads it, with the accuracy of `diagnose.py --task`."""
  found = choices.questions(pathlib.Path(path).expanduser())
  strings = [[choices.texts(q.context, c) for c in q.choices] for q in found]
  docs = [{'context': own[0][0], 'choices': [c for _, c in own], 'answer': q.answer} for q, own in zip(found, strings)]
  def rows(**kwargs):
    import datasets
    return {'test': datasets.Dataset.from_list(docs)}
  return {'task': pathlib.Path(path).stem, 'custom_dataset': rows, 'test_split': 'test',
          'output_type': 'multiple_choice', 'doc_to_text': lambda doc: doc['context'],
          'doc_to_choice': lambda doc: doc['choices'], 'doc_to_target': lambda doc: doc['answer'],
          'target_delimiter': '', 'num_fewshot': 0, 'metadata': {'version': 1.0},
          'metric_list': [{'metric': 'acc', 'aggregation': 'mean', 'higher_is_better': True}]}


def build(manager, specs: Sequence, data_dir: str, num_fewshot: int | None, folder: pathlib.Path) -> list:
  """The tasks, with their data.

  Args:
    manager: lm-eval's TaskManager.
    specs: names of tasks, groups and tags that it knows, or tasks as dicts.
    data_dir: folder with copies of data sets; '': none.
    folder: for files that say where a task's data are.

  Raises:
    UserError: an unknown name, no data, or data that are not what the task reads.
  """
  built = []
  for spec in specs:
    lacking = None
    if isinstance(spec, str):
      lacking = _localise(manager.task_index, _known(manager, spec), data_dir, num_fewshot, folder)
    try:
      found = manager.load([spec])
    except Exception as error:  # of whatever reads the data, of a task's own functions and templates
      name = spec if isinstance(spec, str) else spec['task']
      raise UserError(f'the data of task {lacking[0] if lacking else name} cannot be opened'
                      f'{lacking[1] if lacking else ""}: {_reason(error)}.') from None
    built += [found['groups'][spec]] if isinstance(spec, str) and spec in found['groups'] else found['tasks'].values()
  try:
    manager.load(built)
  except ValueError as error:  # one within another
    raise UserError(f'--tasks: {_reason(error)}.') from None
  return built


def _known(manager, name: str) -> str:
  if name not in manager.all_tasks:
    close = difflib.get_close_matches(name, [*mmlu_dev.NAMES, *manager.all_tasks], n=3)
    raise UserError(f'lm-eval has no task {name!r}' + (f'; it has {", ".join(close)}.' if close else '; the paper has '
                    f'{", ".join(PAPER)}, and --include_path names a folder with tasks of your own.'))
  return name


def _reason(error: Exception) -> str:
  lines = [line for line in str(error).splitlines() if line.strip()]
  return f'{type(error).__name__}' + (f', {lines[0].strip().rstrip(".")}' if lines else '')


def _localise(index, name: str, data_dir: str, num_fewshot: int | None, folder: pathlib.Path) -> tuple[str, str] | None:
  """Points the tasks below a name to local files. Returns (the first that has none, where they were looked for)."""
  lacking = None
  for leaf in leaves(index, name):
    config = index[leaf].cfg
    if config.get('dataset_path') in (None, *FORMATS.values()) or index[leaf].yaml_path.parent == folder:
      continue  # a task made of files, or of its own code, says itself where its data are; or this is done
    looked = _folders(data_dir, leaf, config)
    files = next(filter(None, (_files(f, config) for f in looked)), {})
    if not files:
      lacking = lacking or (leaf, f'; they are in none of {", ".join(map(str, looked))}' if data_dir else
                            ', without --data_dir, in the cache of the library `datasets`')
      continue
    _check_splits(leaf, config, files, num_fewshot)
    path = folder / f'{leaf}.yaml'
    kind = FORMATS[_suffix(next(iter(files.values()))[0])]
    path.write_text(yaml.safe_dump({
        'include': str(index[leaf].yaml_path), 'task': leaf, 'dataset_path': kind, 'dataset_name': None,
        'dataset_kwargs': {'data_files': {k: [str(f) for f in found] for k, found in files.items()}},
        **{s: None for s in SPLITS if config.get(s) not in files}}))
    index[leaf].yaml_path = path
  return lacking


def leaves(index, name: str) -> Iterator[str]:
  """The single tasks that a name stands for."""
  entry = index[name]
  below = sorted(entry.tags) if entry.kind.name == 'TAG' else (entry.cfg or {}).get('task')
  if not isinstance(below, list):
    yield name
    return
  for item in below:
    item = (item.get('group') or item.get('task')) if isinstance(item, dict) else item
    if item in index:
      yield from leaves(index, item)


def _folders(data_dir: str, leaf: str, config: dict) -> list[pathlib.Path]:
  if not data_dir:
    return []
  root = pathlib.Path(data_dir).expanduser()
  repository, subset = root / config['dataset_path'], config.get('dataset_name')
  # What lies beside the folders of subsets may be any of them.
  return [root / leaf, *([repository / str(subset)] if subset else [repository / 'data', repository])]


def _suffix(path: pathlib.Path) -> str:
  return path.with_suffix('').suffix if path.suffix == '.gz' else path.suffix


def _files(folder: pathlib.Path, config: dict) -> dict[str, list[pathlib.Path]]:
  """{split: its files} of the splits that a task has and the folder holds."""
  found = {}
  for split in {config[s] for s in SPLITS if config.get(s)}:
    named = re.compile(re.escape(split) + r'([-_.]\S*)?')
    own = sorted(f for f in folder.glob(f'{glob.escape(split)}*')
                 if _suffix(f) in FORMATS and named.fullmatch(f.name.removesuffix('.gz').removesuffix(_suffix(f))))
    if own:
      found[split] = [f for f in own if _suffix(f) == _suffix(own[0])]
  return found


def _check_splits(leaf: str, config: dict, files: dict, num_fewshot: int | None):
  """Refuses what would be scored on another split than the task's, or take its examples from what it scores."""
  scored = config.get('test_split') or config.get('validation_split')
  shots = config.get('num_fewshot') if num_fewshot is None else num_fewshot
  shown = config.get('fewshot_split') or config.get('training_split') or config.get('validation_split')
  for split in (scored, shown) if shots else (scored,):
    if split and split not in files:
      where = next(iter(files.values()))[0].parent
      raise UserError(f'task {leaf} reads the split {split!r}, which {where} has not; it has '
                      f'{", ".join(sorted(files))}.')
