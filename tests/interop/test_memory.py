"""A model is read one tensor at a time: its own size, and little more, is what loading takes."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

import hf_folders
from lns_jax.config import ModelConfig
from lns_jax.interop import names

MODEL = dict(vocab_size=32000, d_model=1536, d_ff=4096, num_layers=16, num_heads=16)
CONFIG = {'model_type': 'llama', 'vocab_size': 32000, 'hidden_size': 1536, 'intermediate_size': 4096,
          'num_hidden_layers': 16, 'num_attention_heads': 16}
# Peak of anonymous memory, which mapped files are no part of, seen every 2 ms; the start of jax is taken off.
LOAD = '''
import sys, threading, time
import jax, lns_jax
from lns_jax.models import transformer
def anonymous():
  return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('RssAnon')) * 1024
jax.numpy.zeros(1).block_until_ready()
import lns_jax.interop.load, safetensors
base, peak, done = anonymous(), [0], []
def watch():
  while not done:
    peak[0] = max(peak[0], anonymous())
    time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
config, params, _ = lns_jax.load(sys.argv[1])
done.append(1)
thread.join()
print((peak[0] - base) / sum(x.nbytes for x in jax.tree.leaves(params)))
'''


@pytest.mark.slow
def test_two_gigabytes_are_loaded_in_1_2_times_their_size(tmp_path):
  config = ModelConfig(**MODEL, max_positions=2048)
  shapes, shards = names.shapes(config), [{} for _ in range(4)]
  row = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
  for i, entry in enumerate(names.table(config, names.LLAMA)):
    shape = entry.write(np.broadcast_to(np.float32(0), shapes[entry.ours].shape), config).shape
    shards[i % 4][entry.theirs] = np.resize(row, shape)
  path = hf_folders.write(tmp_path / 'big', CONFIG, shards)
  assert sum(f.stat().st_size for f in pathlib.Path(path).glob('*.safetensors')) > 2e9
  run = subprocess.run([sys.executable, '-c', LOAD, str(path)], capture_output=True, text=True, check=True)
  ratio = float(run.stdout.split()[-1])
  print(f'peak of anonymous memory: {ratio:.3f} of the model')
  assert 0.9 < ratio < 1.2, run.stdout
