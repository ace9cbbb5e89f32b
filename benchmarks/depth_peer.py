"""The paper's procedure for angular distances and removals in torch: the peer of depth.py. Needs torch, transformers.

  python benchmarks/depth_peer.py ROWS T V D F L H K

One forward pass for each distance n and each row, of which two hidden states are compared; a model of its own for each
removed layer, one forward pass for each row (paper.md 6.8). Prints JSON with seconds.
"""

import copy
import json
import math
import sys
import time

import torch
import transformers


def angular(model, rows, L: int):
  for n in range(1, L + 1):
    for row in rows:
      states = model(row[None], output_hidden_states=True).hidden_states
      for l in range(L + 1 - n):
        a, b = states[l].float(), states[l + n].float()
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1).clamp(-1, 1)
        (torch.arccos(cosine) / math.pi).mean().item()


def removal(model, rows, L: int):
  for l in range(L):
    less = copy.copy(model)
    less.model = copy.copy(model.model)
    less._modules = dict(model._modules, model=less.model)
    less.model._modules = dict(model.model._modules)
    less.model.layers = torch.nn.ModuleList([m for i, m in enumerate(model.model.layers) if i != l])
    plain(less, rows)
  plain(model, rows)


def plain(model, rows, *_):
  for row in rows:
    model(row[None], labels=row[None]).loss.item()


def main():
  count, T, V, D, F, L, H, K = map(int, sys.argv[1:])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=L,
                                    num_attention_heads=H, num_key_value_heads=K, tie_word_embeddings=True,
                                    use_cache=False)
  model = transformers.LlamaForCausalLM(config).eval()
  rows = torch.randint(0, V, (count, T))
  seconds = {}
  with torch.no_grad():
    plain(model, rows)
    for work in (plain, angular, removal):
      start = time.perf_counter()
      work(model, rows, L)
      seconds[work.__name__] = time.perf_counter() - start
  print(json.dumps(seconds))


if __name__ == '__main__':
  main()
