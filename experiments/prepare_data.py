"""Turns text into tokenised, packed rows (array_record in TFDS layout) that training reads.

  python experiments/prepare_data.py --source=embedded --out=data/embedded
  python experiments/prepare_data.py --source=c4_json_gz/ --tokenizer=t5.model --packing=paper --noadd_bos --out=data/c4
  python experiments/prepare_data.py --source=tfds:c4/en --data_dir=tfds/ --tokenizer=t5.model --packing=paper \\
    --noadd_bos --out=data/c4

The presets of the paper want --packing=paper --noadd_bos; a run names the setting in which prepared data differ.

--source: embedded; a file or folder of .txt, .jsonl, .json.gz, .zst, .parquet or token shards (.npy, .bin);
tfds:NAME. Files named train and validation (or val, valid) are those splits; otherwise a share is held out.
A killed run goes on where it was when it is started again. Then train with --config.data.source=OUT.
"""

import dataclasses
import json
import pathlib
import sys
import time

from absl import flags

from lns_jax import cli
from lns_jax.config import DataConfig

# Not about what is on disk.
_OF_TRAINING = ('seed', 'read_threads')
_DEFINE = {str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float, bool: flags.DEFINE_bool}

OUT = flags.DEFINE_string('out', None, 'Folder to write; a complete one with the same settings is found again.')
VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 32000, 'Tokens of a tokenizer that is trained here (bpe).', 258)
SETTINGS = {f.name: _DEFINE[f.type](f.name, f.default, f.metadata['doc'])
            for f in dataclasses.fields(DataConfig) if f.name not in _OF_TRAINING}
flags.mark_flags_as_required(['out'])


def main():
  start = time.time()
  data = DataConfig(**{name: holder.value for name, holder in SETTINGS.items()})
  from lns_jax.data import prepare, rows
  found = (pathlib.Path(OUT.value) / rows.INFO).exists()
  folder = prepare.prepare(data, VOCAB_SIZE.value if data.tokenizer == 'bpe' else 0, out=OUT.value)
  info = json.loads((folder / rows.INFO).read_text())
  _tell(info, found)
  keys = ('fingerprint', 'corpus_hash', 'tokenizer', 'splits', 'dropped', 'ignored_files')
  return {'out': str(folder), 'found': found, **{k: info[k] for k in keys}, 'seconds': round(time.time() - start, 3)}


def _tell(info: dict, found: bool) -> None:
  """What is in the folder, for people."""
  if found:
    print('found prepared, nothing to do', file=sys.stderr)
  for split, c in info['splits'].items():
    print(f'{split}: {c["documents"]:,} documents, {c["bytes"]:,} bytes, {c["tokens"]:,} tokens, {c["rows"]:,} rows'
          + (f', {c["tokens_cut"]:,} tokens cut off' if c['tokens_cut'] else ''), file=sys.stderr)
  d = info['dropped']
  print(f'dropped: {d["empty"]:,} empty documents, {d["over_budget"]:,} beyond the size of the validation split; '
        f'{d["non_utf8"]:,} kept with broken UTF-8 replaced; {len(info["ignored_files"]):,} files ignored',
        file=sys.stderr)


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
