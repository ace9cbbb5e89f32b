"""The other side of decode.py: transformers' generate with its cache. Needs torch and transformers.

Reads batch sizes, writes the seconds of each step, as a stopping criterion of `generate` sees the tokens come.
"""

import json
import os
import sys
import time

import torch
import transformers


class Watched(transformers.StoppingCriteria):
  """Notes when tokens come; stops nothing."""

  def __init__(self):
    self.times = []

  def __call__(self, input_ids, scores, **kwargs):
    self.times.append(time.perf_counter())
    return torch.zeros(len(input_ids), dtype=torch.bool)


def main():
  new = int(sys.argv[1])
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
      vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
      num_key_value_heads=3, tie_word_embeddings=True, eos_token_id=None)
  model = transformers.LlamaForCausalLM(config).eval()
  for line in sys.stdin:
    tokens = torch.randint(0, 49152, (int(line), 32))
    watched = Watched()
    with torch.inference_mode():
      model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new + 1, do_sample=False,
                     pad_token_id=0, stopping_criteria=transformers.StoppingCriteriaList([watched]))
    print(json.dumps([b - a for a, b in zip(watched.times, watched.times[1:])]), flush=True)


if __name__ == '__main__':
  main()
