"""The embedded corpus: text that every Python carries, so that the first run needs no download.

The standard library without tests and the English documentation topics, one document a file or topic,
written by a TFDS builder into array_record. It differs between Python versions; its hash says which it is.
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import sysconfig
import tempfile

from lns_jax.errors import UserError

# Validation documents are drawn from files of at most this size, so that one file cannot fill the split.
VALIDATION_FILE_BYTES = 1 << 16
# Reserved for validation: more than 100k tokens of any tokenizer that makes under 12 bytes a token.
VALIDATION_BYTES = 1_200_000
# Of these, whole files while they sum up to at most this (lns_jax.data.prepare).
VALIDATION_TOKENS = 200_000
RULE = 'embedded, rule 1'
NAME = 'lns_embedded'

_SKIPPED = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__', 'lib-dynload'}
# Written when Python was built: paths of that machine, not text.
_GENERATED = ('_sysconfigdata', 'config-')


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Documents (name, bytes) of both splits in their final order, and the hash of all of it."""

  train: tuple[tuple[str, bytes], ...]
  validation: tuple[tuple[str, bytes], ...]
  hash: str


def collect(stdlib=None) -> Corpus:
  """Reads the files and topics of the running Python and splits them by a hash of their name.

  Args:
    stdlib: folder of the standard library; default: the running Python's.

  Raises:
    UserError: if this Python has no readable standard library on disk.
  """
  root = pathlib.Path(stdlib or sysconfig.get_path('stdlib'))
  documents = {}
  for path in sorted(root.rglob('*.py')):
    parts = path.relative_to(root).parts
    if not _SKIPPED.intersection(parts) and not any(p.startswith(_GENERATED) for p in parts):
      with contextlib.suppress(OSError):  # some distributions leave dangling links
        documents['/'.join(parts)] = path.read_bytes()
  documents.pop('pydoc_data/topics.py', None)  # the same text, escaped into one literal
  documents.update(_topics())
  order = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
  reserved, size = [], 0
  for name in order:
    if size < VALIDATION_BYTES and len(documents[name]) <= VALIDATION_FILE_BYTES:
      reserved.append(name)
      size += len(documents[name])
  train = [name for name in order if name not in set(reserved)]
  if not train or size < VALIDATION_BYTES:
    raise UserError(f'this Python carries too little text in {root} to train on; give data.source a file or folder.')
  digest = hashlib.sha256(RULE.encode())
  for name in order:
    digest.update(f'\n{name}\n{len(documents[name])}\n'.encode() + documents[name])
  return Corpus(tuple((n, documents[n]) for n in train), tuple((n, documents[n]) for n in reserved),
                digest.hexdigest())


def _topics() -> dict[str, bytes]:
  try:
    from pydoc_data import topics
  except ImportError:  # slim distributions
    return {}
  return {f'topics/{name}.txt': text.encode() for name, text in topics.topics.items()}


def build(corpus: Corpus, data_dir) -> pathlib.Path:
  """Writes the corpus through TFDS (or finds it written) and returns the builder's folder."""
  data_dir = pathlib.Path(data_dir)
  done = data_dir / NAME / '1.0.0'
  if (done / 'dataset_info.json').exists():
    return done
  import tensorflow_datasets as tfds

  from lns_jax.data import embedded_builder
  data_dir.mkdir(parents=True, exist_ok=True)
  tfds.disable_progress_bar()
  # A folder of its own: two processes that start together must not write the same files.
  with tempfile.TemporaryDirectory(dir=data_dir) as temporary:
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints; stdout belongs to the result
      builder = embedded_builder.LnsEmbedded(
          splits={'train': corpus.train, 'validation': corpus.validation},
          data_dir=temporary, file_format='array_record')
      builder.download_and_prepare()
    done.parent.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # the other process was first
      os.rename(pathlib.Path(temporary) / NAME / '1.0.0', done)
  return done
