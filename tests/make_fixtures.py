"""Makes tests/fixtures/*.npz: what transformers computes for tiny models of several architectures.

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

import make_vl_fixtures

FOLDER = pathlib.Path(__file__).parent / 'fixtures'
B, T, PROMPT, NEW, CUT = 2, 32, 5, 16, 19  # CUT: where a row of two packed documents is divided

# Each differs from the others in several settings, so that no wrong reading of one of them fits all.
LLAMAS = {
    'gqa': dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False,
                rope_theta=5e5, rms_norm_eps=1e-5, num_hidden_layers=3),
    'mha_tied': dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True,
                     rope_theta=1e4, rms_norm_eps=1e-6, num_hidden_layers=2),
    'mqa': dict(num_attention_heads=4, num_key_value_heads=1, head_dim=6, tie_word_embeddings=False,
                rope_theta=1e4, rms_norm_eps=1e-5, num_hidden_layers=2),
}
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=40, max_position_embeddings=64)

# What sets each apart is small enough to matter within 16 tokens; these fixtures hold no gradients and no greedy text.
OTHERS = {
    'Qwen2': dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6,
                  rms_norm_eps=1e-6, num_hidden_layers=2),
    'Qwen3': dict(num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=True, rope_theta=1e6,
                  rms_norm_eps=1e-6, num_hidden_layers=2),
    'Mistral': dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6, tie_word_embeddings=False,
                    rope_theta=1e4, rms_norm_eps=1e-5, sliding_window=4, num_hidden_layers=3),
    'Olmo': dict(num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False, rope_theta=1e4,
                 clip_qkv=0.8, num_hidden_layers=2),
    'Olmo2': dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, rope_theta=5e5,
                  rms_norm_eps=1e-6, num_hidden_layers=2),
}
SMALL = dict(vocab_size=61, hidden_size=24, intermediate_size=32, max_position_embeddings=64)
SHORT_T, SHORT_CUT = 16, 9
# Three patches in a row: rows and columns of patches cannot be mixed up unseen.
VIT = dict(image_size=6, patch_size=2, num_channels=3, hidden_size=24, intermediate_size=32, num_hidden_layers=3,
           num_attention_heads=4, layer_norm_eps=1e-6, qkv_bias=True, hidden_act='gelu')
BERT = dict(vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
            max_position_embeddings=20, type_vocab_size=3, layer_norm_eps=1e-12, hidden_act='gelu')
BERT_T = 12


def build(seed: int, family: str, settings: dict) -> transformers.PreTrainedModel:
  """A float32 model whose every weight, norms and biases included, is random."""
  settings = dict(settings)
  rope = {'rope_type': 'default', 'rope_theta': settings.pop('rope_theta')}
  config = getattr(transformers, f'{family}Config')(
      **settings, rope_parameters=rope, attn_implementation='eager', bos_token_id=None, eos_token_id=None,
      pad_token_id=None)
  model = getattr(transformers, f'{family}ForCausalLM')(config).float().eval()
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, p in model.named_parameters():
      if 'norm' in name:
        value = rng.uniform(0.5, 1.5, p.shape)
      elif 'bias' in name:
        value = 0.5 * rng.standard_normal(p.shape)
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


def draw_tokens(seed: int, length: int) -> torch.Tensor:
  return torch.from_numpy(np.random.default_rng([seed, 1]).integers(0, SIZES['vocab_size'], (B, length)))


def forward_reference(model, tokens, cut: int) -> dict[str, torch.Tensor]:
  """Weights, logits and states, the logits of two packed documents, and those under LayerNorm Scaling."""
  found = {f'weight/{n}': p for n, p in model.named_parameters()} | {'tokens': tokens}
  with torch.no_grad():
    found |= run(model, tokens)
    parts = [run(model, part)['logits'] for part in (tokens[:, :cut], tokens[:, cut:])]
    found['packed_logits'] = torch.cat(parts, dim=1)
    if hasattr(model.model.layers[0], 'input_layernorm'):
      with layer_norm_scaling(model):
        lns = run(model, tokens)
        found |= {'lns_logits': lns['logits'], 'lns_states': lns['states']}
  return found


def vision_reference(seed: int) -> dict[str, torch.Tensor]:
  """Weights, logits and states of a tiny ViT with everything random, plain and under LayerNorm Scaling."""
  config = transformers.ViTConfig(**VIT, num_labels=7, attn_implementation='eager')
  model = transformers.ViTForImageClassification(config).float().eval()
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, p in model.named_parameters():
      is_gain = 'norm' in name and name.endswith('weight')
      scale = np.prod(p.shape[1:]) ** -0.5 if name.endswith('weight') else 0.5
      value = rng.uniform(0.5, 1.5, p.shape) if is_gain else scale * rng.standard_normal(p.shape)
      p.copy_(torch.from_numpy(value.astype(np.float32)))
    size = VIT['image_size']
    images = torch.from_numpy(rng.standard_normal((B, size, size, VIT['num_channels'])).astype(np.float32))
    found = {f'weight/{n}': p for n, p in model.named_parameters()} | {'images': images} | vision_run(model, images)
    for l, layer in enumerate(model.vit.layers, 1):
      for norm in (layer.layernorm_before, layer.layernorm_after):
        norm.register_forward_hook(lambda _, __, out, l=l: out * l ** -0.5)
    return found | {f'lns_{k}': v for k, v in vision_run(model, images).items()}


def vision_run(model, images) -> dict[str, torch.Tensor]:
  """Logits and the L + 1 states, which of a ViT are all before the final norm."""
  out = model(images.permute(0, 3, 1, 2), output_hidden_states=True)
  again = model.classifier(model.vit.layernorm(out.hidden_states[-1])[:, 0])
  assert torch.allclose(again, out.logits, atol=1e-6), 'the last state is not the one before the final norm'
  return {'logits': out.logits, 'states': torch.stack(out.hidden_states)}


def encoder_reference(seed: int) -> dict[str, torch.Tensor]:
  """Weights, logits of two heads and states of a tiny BERT, everything random; nobody sees the padding of row 1."""
  config, rng = transformers.BertConfig(**BERT, attn_implementation='eager'), np.random.default_rng(seed)
  tokens, types = (torch.from_numpy(rng.integers(0, n, (B, BERT_T))) for n in (BERT['vocab_size'], 3))
  mask = torch.ones(B, BERT_T, dtype=torch.int64)
  mask[1, BERT_T - 4:] = 0
  found = {'tokens': tokens, 'token_types': types, 'mask': mask}
  with torch.no_grad():
    for kind in ('MaskedLM', 'QuestionAnswering'):
      model, rng = getattr(transformers, f'BertFor{kind}')(config).float().eval(), np.random.default_rng([seed, 1])
      for name, p in model.named_parameters():  # both kinds begin with the same encoder, and so with the same numbers
        is_gain, is_table = 'LayerNorm.weight' in name, 'embeddings.weight' in name
        scale = 0.5 if p.ndim == 1 else 0.3 if is_table else p.shape[1] ** -0.5
        value = rng.uniform(0.5, 1.5, p.shape) if is_gain else scale * rng.standard_normal(p.shape)
        p.copy_(torch.from_numpy(value.astype(np.float32)))
      found |= {f'weight/{n}': p for n, p in model.named_parameters()}
      out = model(tokens, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
      if kind == 'MaskedLM':
        found |= {'logits': out.logits, 'states': torch.stack(out.hidden_states)}
        found['untyped_logits'] = model(tokens, attention_mask=mask).logits
      else:
        assert torch.equal(torch.stack(out.hidden_states), found['states'])
        found['squad_logits'] = torch.stack([out.start_logits, out.end_logits], dim=-1)
  return found


def save(name: str, found: dict[str, torch.Tensor], **meta):
  """Writes one fixture; `meta` says how to read it."""
  versions = {m.__name__: m.__version__ for m in (torch, transformers, np)}
  arrays = {k: v.detach().numpy() for k, v in found.items()}
  path = FOLDER / f'{name}.npz'
  np.savez_compressed(path, **arrays, meta=np.array(json.dumps({**meta, 'versions': versions})))
  print(path.name, path.stat().st_size)


def main():
  for seed, (name, settings) in enumerate(LLAMAS.items(), 1):
    settings = {**SIZES, **settings}
    model, tokens = build(seed, 'Llama', settings), draw_tokens(seed, T)
    found = gradients(model, tokens) | forward_reference(model, tokens, CUT)
    with torch.no_grad():
      found['greedy'] = greedy(model, tokens[:, :PROMPT])
    save(f'llama_{name}', found, config=settings, cut=CUT, prompt=PROMPT)
  for seed, (family, settings) in enumerate(OTHERS.items(), len(LLAMAS) + 1):
    settings = {**SMALL, **settings}
    model, tokens = build(seed, family, settings), draw_tokens(seed, SHORT_T)
    save(family.lower(), forward_reference(model, tokens, SHORT_CUT), config=settings, cut=SHORT_CUT)
  save('vit', vision_reference(len(LLAMAS) + len(OTHERS) + 1), config=VIT)
  save('bert', encoder_reference(20), config=BERT)
  for name, found, meta in make_vl_fixtures.fixtures(20):
    save(name, found, **meta)


if __name__ == '__main__':
  main()
