"""Memory, FLOPs and a roofline of every preset from 60M to 7B on TPU topologies, compiled here and never run.

  python benchmarks/tpu_table.py --out=docs/tpu_table

Each entry is a run of experiments/compile_for_tpu.py in its own process, minutes each; its result is a line of
OUT.jsonl as soon as it is there, and what is there is not compiled again, unless it failed, so that it can be stopped
at any time. OUT.md is written anew from the lines after each. --entries=N stops after N.
"""

import json
import pathlib
import subprocess
import sys

from absl import flags

from lns_jax import cli
from lns_jax.aot import table
from lns_jax.errors import UserError

OUT = flags.DEFINE_string('out', 'docs/tpu_table', 'Where to: OUT.jsonl and OUT.md.')
ENTRIES = flags.DEFINE_integer('entries', 0, 'Entries to compile at most; 0: all.', lower_bound=0)
ONLY = flags.DEFINE_string('only', '', 'Only entries whose preset or topology has this in its name.')

FSDP = ('mesh.data=1', 'mesh.fsdp=-1')
# A host of 4 or 8 chips, or a small pod slice, is what people have for the small ones. From 1B on the state wants more
# memory than a chip has: fsdp over a slice, of the cheap chips (v5e, v6e) and of the large ones (v4, v5p, v7x).
SMALL = (('v5e:2x2', ()), ('v5e:4x4', ()))
BILLION = (('v5e:4x4', FSDP), ('v6e:2x4', FSDP), ('v4:2x2x4', FSDP))
LARGE = (('v5e:8x8', FSDP), ('v6e:4x8', FSDP), ('v5p:2x4x4', FSDP))
PRESETS = {
    **dict.fromkeys(('llama_60m', 'llama_71m', 'llama_130m', 'llama_250m', 'llama_350m', 'olmo_60m', 'olmo_150m',
                     'olmo_300m', 'qwen2_5_0_5b', 'qwen3_0_6b'), SMALL),
    **dict.fromkeys(('llama_1b', 'olmo_1b', 'olmo2_1b'), BILLION), 'llama_3b': LARGE,
    **dict.fromkeys(('llama_7b', 'olmo_7b', 'mistral_7b'), (*LARGE, ('v7x:2x2x4', FSDP)))}
EVERY = ('model.loop=scan',)  # one compiled body

MARK = (*FSDP, 'data.seq_len=2048', 'model.remat=full', 'train.layer_stats_every=0')
# Shapes and settings that MaxText 0.2.5 was compiled with: 4 rows of 2048 a chip, of the last 2.
MARKS = (
    ('llama_130m', 'v5e:4x4', (*MARK, 'train.batch_size=64', 'model.attention=xla')),
    ('llama_130m', 'v5e:4x4', (*MARK, 'train.batch_size=64', 'model.attention=splash')),
    ('llama_1b', 'v5e:4x4', (*MARK, 'train.batch_size=64', 'model.attention=splash')),
    ('llama_7b', 'v5e:16x16', (*MARK, 'train.batch_size=512', 'model.attention=splash')))


def entries() -> list[tuple[str, str, tuple[str, ...]]]:
  """(preset, topology, settings) of all: the marks, then the presets, the small ones first."""
  presets = [(name, topology, settings) for name, places in PRESETS.items() for topology, settings in places]
  return [(name, topology, (*EVERY, *settings)) for name, topology, settings in (*MARKS, *presets)]


def command(name: str, topology: str, settings: tuple[str, ...]) -> list[str]:
  return ['experiments/compile_for_tpu.py', f'--config={name}', f'--topology={topology}',
          *(f'--config.{s}' for s in settings)]


def compiled(arguments: list[str]) -> dict:
  """The result of one command, or {'error': its sentence}."""
  root = pathlib.Path(__file__).parent.parent
  run = subprocess.run([sys.executable, str(root / arguments[0]), *arguments[1:]], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, text=True)
  if run.returncode < 0 or run.returncode == 130:
    raise UserError(f'{" ".join(arguments)} was stopped (code {run.returncode}).')
  return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {'error': run.stderr.splitlines()[-1]}


def main():
  lines = pathlib.Path(OUT.value).with_suffix('.jsonl')
  found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
  found = [f for f in found if 'error' not in f]  # tried again
  known = {tuple(f['command']) for f in found}
  wanted = [command(*e) for e in entries() if ONLY.value in e[0] or ONLY.value in e[1]]
  missing = [c for c in wanted if tuple(c) not in known][:ENTRIES.value or None]
  for number, arguments in enumerate(missing, 1):
    print(f'{number} of {len(missing)}: {" ".join(arguments)}', file=sys.stderr, flush=True)
    found.append({'command': arguments, **compiled(arguments)})
    with lines.open('a') as file:
      file.write(json.dumps(found[-1]) + '\n')
    pathlib.Path(OUT.value).with_suffix('.md').write_text(table.page(found))
  return {'entries': len(found), 'compiled': len(missing), 'missing': sum(tuple(c) not in known for c in wanted)
          - len(missing), 'out': OUT.value}


if __name__ == '__main__':
  cli.run(main)
