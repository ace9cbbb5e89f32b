"""Makes tests/fixtures/llama_*.npz: what transformers computes for tiny Llama models.

  python tests/make_fixtures.py

Needs the [parity] extra (torch, transformers); the tests that read the fixtures do not. The weights are drawn by
numpy from fixed seeds, so that a run on another machine gives the same numbers up to rounding.
"""

import contextlib
import json
import pathlib

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / 'fixtures'
B, T, PROMPT, NEW, CUT = 2, 32, 5, 16, 19  # CUT: where a row of two packed documents is divided

# Each differs from the others in several settings, so that no wrong reading of one of them fits all.
MODELS = {
    'gqa': dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False,
                rope_theta=5e5, rms_norm_eps=1e-5, num_hidden_layers=3),
    'mha_tied': dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True,
                     rope_theta=1e4, rms_norm_eps=1e-6, num_hidden_layers=2),
    'mqa': dict(num_attention_heads=4, num_key_value_heads=1, head_dim=6, tie_word_embeddings=False,
                rope_theta=1e4, rms_norm_eps=1e-5, num_hidden_layers=2),
}
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=40, max_position_embeddings=64)


def build(seed: int, settings: dict) -> transformers.LlamaForCausalLM:
  """A float32 model whose every weight, the norms' included, is random."""
  settings = dict(settings)
  rope = {'rope_type': 'default', 'rope_theta': settings.pop('rope_theta')}
  config = transformers.LlamaConfig(**SIZES, **settings, rope_parameters=rope, attn_implementation='eager',
                                    bos_token_id=None, eos_token_id=None, pad_token_id=None)
  model = transformers.LlamaForCausalLM(config).float().eval()
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, p in model.named_parameters():
      if 'norm' in name:
        value = rng.uniform(0.5, 1.5, p.shape)
      elif 'embed' in name:
        value = 0.1 * rng.standard_normal(p.shape)  # small, so that the norm's eps can be seen
      else:  # sharp attention, so that rotary positions can be seen
        value = rng.standard_normal(p.shape) * (2 if 'q_proj' in name else 1) / p.shape[1] ** 0.5
      p.copy_(torch.from_numpy(value.astype(np.float32)))
  return model


@contextlib.contextmanager
def layer_norm_scaling(model):
  """Multiplies the output of both norms of layer l (1-based) by 1/sqrt(l); the final norm stays."""
  handles = []
  for l, layer in enumerate(model.model.layers, 1):
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
      handles.append(norm.register_forward_hook(lambda _, __, out, l=l: out * l ** -0.5))
  yield
  for handle in handles:
    handle.remove()


def run(model, tokens) -> dict[str, torch.Tensor]:
  """Logits and the L + 1 states, the last one caught before the final norm, and that norm's output."""
  caught = {}
  hook = model.model.layers[-1].register_forward_hook(
      lambda _, __, out: caught.update(last=out[0] if isinstance(out, tuple) else out))
  out = model(input_ids=tokens, output_hidden_states=True)
  hook.remove()
  states = [*out.hidden_states[:-1], caught['last']]
  return {'logits': out.logits, 'states': torch.stack(states), 'normed': out.hidden_states[-1]}


def gradients(model, tokens) -> dict[str, torch.Tensor]:
  """Mean loss of predicting each next token, and its gradient by every weight."""
  model.zero_grad()
  loss = model(input_ids=tokens, labels=tokens).loss
  loss.backward()
  return {'loss': loss, **{f'grad/{n}': p.grad for n, p in model.named_parameters()}}


def greedy(model, tokens) -> torch.Tensor:
  """[B, PROMPT + NEW]: the first tokens of each row and their greedy continuation."""
  for _ in range(NEW):
    logits = model(input_ids=tokens).logits[:, -1]
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3, 'a near tie: another seed would do'
    tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
  return tokens


def reference(seed: int, settings: dict) -> dict[str, np.ndarray]:
  """Everything that one fixture holds."""
  model = build(seed, settings)
  tokens = torch.from_numpy(np.random.default_rng([seed, 1]).integers(0, SIZES['vocab_size'], (B, T)))
  found = {f'weight/{n}': p for n, p in model.named_parameters()} | gradients(model, tokens)
  with torch.no_grad():
    found |= run(model, tokens) | {'greedy': greedy(model, tokens[:, :PROMPT])}
    parts = [run(model, part)['logits'] for part in (tokens[:, :CUT], tokens[:, CUT:])]
    found['packed_logits'] = torch.cat(parts, dim=1)
    with layer_norm_scaling(model):
      lns = run(model, tokens)
      found |= {'lns_logits': lns['logits'], 'lns_states': lns['states']}
  arrays = {k: v.detach().numpy() for k, v in (found | {'tokens': tokens}).items()}
  meta = {'config': {**SIZES, **settings}, 'cut': CUT, 'prompt': PROMPT,
          'versions': {m.__name__: m.__version__ for m in (torch, transformers, np)}}
  return arrays | {'meta': np.array(json.dumps(meta))}


def main():
  for seed, (name, settings) in enumerate(MODELS.items(), 1):
    path = FOLDER / f'llama_{name}.npz'
    np.savez_compressed(path, **reference(seed, settings))
    print(path.name, path.stat().st_size)


if __name__ == '__main__':
  main()
