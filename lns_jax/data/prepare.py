"""From `data.source` to a folder of prepared rows: found by fingerprint, or built, in parallel, resumable.

A folder is complete or does not exist: the work happens in `NAME.partial-FINGERPRINT` beside it, which is
renamed when all is done. Each finished part of a killed run is used by the next.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator

from lns_jax import files
from lns_jax.config import DataConfig
from lns_jax.data import convert, packing, readers, rows, sources, tokenizers
from lns_jax.errors import UserError

FORMAT = 1  # of the rows on disk and of the rules that make them: raise it when either changes
INLINE_BYTES = 48 << 20  # less than this is done before worker processes have started


def prepare(data: DataConfig, vocab_size: int, *, out=None, progress: bool = True) -> pathlib.Path:
  """The folder of rows that `data` describes; built if there is none.

  Args:
    data: settings. A `source` that is a prepared folder is used as it is.
    vocab_size: V of a tokenizer that is trained here, and the bound for any other; 0: no bound.
    out: where the folder goes; default: the cache, under a name with the fingerprint.
    progress: whether to show a bar on stderr.

  Raises:
    UserError: for a source, tokenizer or folder that cannot be used.
  """
  folder = pathlib.Path(data.source).expanduser()
  if (folder / rows.INFO).is_file():
    _check_settings(folder, data, vocab_size)
    return folder
  try:
    source = sources.resolve(data)
    recipe = _recipe(data, source, vocab_size)
    final = pathlib.Path(out) if out else (
        sources.cache_folder(data) / f'{source.name}-{_fingerprint(recipe)[:12]}')
    if not _is_prepared(final, recipe):
      _make(final, data, source, recipe, vocab_size, progress)
  except OSError as error:
    raise UserError(f'data of {data.source} cannot be prepared: {error.strerror} ({error.filename}).') from None
  return final


def _make(final: pathlib.Path, data, source, recipe, vocab_size, progress) -> None:
  """Builds in a folder beside `final` and moves it there."""
  final.parent.mkdir(parents=True, exist_ok=True)
  with _locked(final.with_name(f'{final.name}.partial-{_fingerprint(recipe)[:8]}')) as partial:
    if _is_prepared(final, recipe):  # by another process, while this one waited
      shutil.rmtree(partial)
      return
    _complete(partial, data, source, recipe, vocab_size, progress)
    if final.exists():
      final.rmdir()  # known to be empty
    os.rename(partial, final)


def _recipe(data: DataConfig, source: sources.Source, vocab_size: int) -> dict:
  """All that decides the rows. A change of any value is another folder, never a silent reuse."""
  if data.tokenizer == 'bpe':
    tokenizer = f'{tokenizers.BPE_RULE}, {vocab_size} tokens'
  else:
    given = _given_tokenizer(data.tokenizer)
    if vocab_size:
      tokenizers.check_vocab(given, vocab_size)
    tokenizer = given.hash
  return {'format': FORMAT, 'source': source.hash, 'validation': source.validation, 'text_field': data.text_field,
          'tokenizer': tokenizer, 'add_bos': data.add_bos, 'packing': data.packing, 'seq_len': data.seq_len}


def _fingerprint(recipe: dict) -> str:
  return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _given_tokenizer(name: str) -> tokenizers.Tokenizer:
  return tokenizers.byte_tokenizer() if name == 'byte' else tokenizers.load(name)


def _is_prepared(folder: pathlib.Path, recipe: dict) -> bool:
  """Whether `folder` holds just these rows. Raises where it holds something else."""
  if not folder.exists():
    return False
  if (folder / rows.INFO).is_file():
    old = rows.read_info(folder)['recipe']
    changed = [k for k in sorted(recipe.keys() | old.keys()) if recipe.get(k) != old.get(k)]
    if changed:
      raise UserError(f'{folder} holds data prepared with {changed[0]} = {old.get(changed[0])!r}, now it is '
                      f'{recipe.get(changed[0])!r}; prepare into another folder.')
    return True
  if not folder.is_dir() or any(folder.iterdir()):
    raise UserError(f'{folder} exists and is not a folder of prepared data; give a new or an empty one.')
  return False


def _check_settings(folder: pathlib.Path, data: DataConfig, vocab_size: int) -> None:
  """Refuses a prepared folder that was made with other settings than the run's."""
  recipe = rows.read_info(folder)['recipe']
  for name in ('seq_len', 'packing', 'add_bos'):
    if recipe[name] != getattr(data, name):
      raise UserError(f'{folder} was prepared with data.{name} = {recipe[name]!r} but the run has '
                      f'{getattr(data, name)!r}.')
  if vocab_size:
    tokenizers.check_vocab(tokenizers.load(folder), vocab_size)


@contextlib.contextmanager
def _locked(partial: pathlib.Path) -> Iterator[pathlib.Path]:
  """The partial folder, for one process; others wait. The system frees the lock when its holder dies."""
  with contextlib.ExitStack() as stack:
    while True:
      partial.mkdir(exist_ok=True)
      # The holder before may have renamed or removed the folder; then there is no lock, or one of nothing.
      with contextlib.suppress(FileNotFoundError):
        file = stack.enter_context(open(partial / '.lock', 'a'))
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(partial / '.lock')):
          break
    yield partial


def _complete(partial: pathlib.Path, data, source, recipe, vocab_size, progress) -> None:
  """Does what is left to do in the partial folder. After an error that left nothing of use, it is removed."""
  try:
    if not (partial / rows.INFO).exists():
      _build(partial, data, source, recipe, vocab_size, progress)
  except UserError:
    if not any(partial.glob('part-*.json')):
      shutil.rmtree(partial)
    raise
  for left in (*partial.glob('part-*.json'), partial / 'tokenizer.done'):
    left.unlink(missing_ok=True)


def _build(partial: pathlib.Path, data, source, recipe, vocab_size, progress) -> None:
  """Fills the partial folder; data_info.json comes last and says that it is complete."""
  tokenizer = _ready_tokenizer(partial, data, source, vocab_size)
  job = convert.Job(str(partial), data.seq_len, data.packing, data.add_bos,
                    readers.Options(data.text_field, tokenizer.eos_id), data.validation_fraction)
  counts = _convert_all(source.parts, job, data.workers, progress)
  total = {key: {name: sum(c[key][name] for c in counts) for name in counts[0][key]} for key in counts[0]}
  _check_splits(data, total)
  rows.write_metadata(partial, packing.id_dtype(tokenizer.vocab_size), _name_files(partial, counts))
  libraries = ('tokenizers', 'sentencepiece', 'tensorflow-datasets', 'array_record', 'grain')
  files.write_json(partial / rows.INFO, {
      'fingerprint': _fingerprint(recipe), 'corpus_hash': source.hash, 'source': data.source, 'recipe': recipe,
      'tokenizer': {'name': tokenizer.name, 'hash': tokenizer.hash, 'vocab_size': tokenizer.vocab_size},
      'splits': {s: total[s] for s in convert.SPLITS}, 'dropped': total['dropped'],
      'ignored_files': list(source.ignored),
      'versions': {'python': platform.python_version(), **{n: importlib.metadata.version(n) for n in libraries}}})


def _ready_tokenizer(partial, data, source, vocab_size) -> tokenizers.Tokenizer:
  """The tokenizer of these rows, saved in the partial folder; trained on the train split if it is to be."""
  saved = partial / 'tokenizer.done'
  if saved.exists():
    return tokenizers.load(partial)
  if data.tokenizer == 'bpe':
    tokenizer = tokenizers.train_bpe(_train_texts(source.parts, data), vocab_size)
  else:
    tokenizer = _given_tokenizer(data.tokenizer)
  tokenizer.save(partial)
  saved.touch()
  return tokenizer


def _train_texts(parts: tuple[readers.Part, ...], data: DataConfig) -> Iterator[str]:
  """Texts of training documents, an equal share of the bound from each of at most 64 parts."""
  parts = [p for p in parts if p.split != 'validation']
  parts = parts[::max(1, -(-len(parts) // 64))]
  for part in parts:
    left = -(-tokenizers.BPE_TRAINING_BYTES // len(parts))
    for document in readers.read(part, readers.Options(data.text_field), Counter()):
      if (part.split or convert.split_of(document.id, data.validation_fraction)) == 'validation':
        continue
      for text in document.chunks:
        yield text[:left]
        left -= len(text)
        if left <= 0:
          break
      if left <= 0:
        break


def _convert_all(parts, job, workers: int, progress: bool) -> list[dict]:
  """Counts of all parts in order; their rows lie in the partial folder."""
  import tqdm
  size = sum(p.size for p in parts)
  workers = min(workers or os.cpu_count() or 1, len(parts))
  bar = tqdm.tqdm(total=size, unit='B', unit_scale=True, desc='preparing', file=sys.stderr, disable=not progress)
  counts: list = [None] * len(parts)
  with bar:
    if workers == 1 or size < INLINE_BYTES:
      for index, part in enumerate(parts):
        counts[index] = convert.convert(index, part, job)
        bar.update(part.size)
      return counts
    # Not fork: the threads of JAX and of the tokenizer would be copied in an unknown state.
    context = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
      futures = {pool.submit(convert.convert, i, p, job): i for i, p in enumerate(parts)}
      try:
        for future in concurrent.futures.as_completed(futures):
          counts[futures[future]] = future.result()
          bar.update(parts[futures[future]].size)
      except concurrent.futures.process.BrokenProcessPool:
        raise UserError('a worker process was killed, perhaps for lack of memory; what is done is kept, '
                        'run again with fewer workers.') from None
      finally:
        pool.shutdown(cancel_futures=True)
  return counts


def _one_thread() -> None:
  """Workers are as many as cores, so that the tokenizer must not start as many threads in each."""
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'


def _name_files(partial: pathlib.Path, counts: list[dict]) -> dict[str, list[int]]:
  """Gives the parts' files their TFDS names, leaving out empty ones; may be repeated after a kill."""
  shard_rows = {}
  for split in convert.SPLITS:
    filled = [i for i, c in enumerate(counts) if c[split]['rows']]
    for position, index in enumerate(filled):
      made, named = convert.part_file(partial, index, split), partial / rows.file_name(split, position, len(filled))
      if made.exists():
        os.rename(made, named)
    shard_rows[split] = [counts[i][split]['rows'] for i in filled]
  return shard_rows


def _check_splits(data: DataConfig, total: dict) -> None:
  """Refuses a corpus without a token, or without one of the splits."""
  empty = [s for s in convert.SPLITS if not total[s]['rows']]
  documents = sum(total[s]['documents'] for s in convert.SPLITS)
  if len(empty) == 2:
    raise UserError(f"no tokens in {data.source}: {total['dropped']['empty']} empty documents and no other.")
  if empty:
    raise UserError(f'none of the {documents} documents of {data.source} fell into the {empty[0]} split; change '
                    f'data.validation_fraction = {data.validation_fraction} or name a file validation.*.')
