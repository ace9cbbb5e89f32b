"""Our side of decode.py: reads batch sizes, writes the seconds of each step of `generate.stream`."""

import json
import sys
import time

import jax
import numpy as np

from lns_jax.config import ModelConfig
from lns_jax.interop import generate
from lns_jax.models import transformer

CONFIG = ModelConfig(vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3,
                     tie_embeddings=True, precision='float32')


def main():
  new = int(sys.argv[1])
  params = jax.jit(lambda rng: transformer.init(CONFIG, rng))(jax.random.key(0))
  for line in sys.stdin:
    prompts = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (int(line), 32)).tolist()
    times = []
    for _ in generate.stream(CONFIG, params, prompts, max_new=new + 1):
      times.append(time.perf_counter())
    print(json.dumps(np.diff(times).tolist()), flush=True)


if __name__ == '__main__':
  main()
