"""Makes tests/fixtures/hf/*: tiny Hugging Face folders as transformers saves them, and what it computes with them.

  python tests/make_folders.py

Needs the [parity] extra, as make_fixtures.py, whose models these are. reference.npz holds tokens (or images), logits
and, where it is cheap to catch, all L + 1 states.
"""

import shutil

import numpy as np
import torch
import transformers
from make_fixtures import FOLDER, LLAMAS, OTHERS, VIT, build, run, vision_run

SIZES = dict(vocab_size=61, hidden_size=24, intermediate_size=32, max_position_embeddings=64, num_hidden_layers=2)
GQA = {**LLAMAS['gqa'], **SIZES}
CASES = {
    'llama': ('Llama', GQA),
    'llama_biased': ('Llama', {**LLAMAS['mha_tied'], **SIZES, 'attention_bias': True, 'mlp_bias': True}),
    'mistral': ('Mistral', {**OTHERS['Mistral'], **SIZES}),
    'qwen2': ('Qwen2', {**OTHERS['Qwen2'], **SIZES}),
    'qwen3': ('Qwen3', {**OTHERS['Qwen3'], **SIZES}),
    'olmo': ('Olmo', {**OTHERS['Olmo'], **SIZES}),
    'olmo2': ('Olmo2', {**OTHERS['Olmo2'], **SIZES}),
}
# Both gates of the window, and layer_types, in four layers.
WINDOWS = {
    'off': dict(use_sliding_window=False, max_window_layers=2),
    'upper': dict(use_sliding_window=True, max_window_layers=2),
    'none': dict(use_sliding_window=True, max_window_layers=4),
    'types': dict(use_sliding_window=True, max_window_layers=2, layer_types=[
        'sliding_attention', 'full_attention', 'full_attention', 'sliding_attention']),
}
ROPES = {
    'linear': dict(factor=2.5),
    'dynamic': dict(factor=2.0),
    'yarn': dict(factor=4.0, original_max_position_embeddings=16),
    'yarn_set': dict(factor=4.0, original_max_position_embeddings=16, beta_fast=8, beta_slow=2, mscale=0.7,
                     mscale_all_dim=0.3, truncate=False),
    'longrope': dict(factor=4.0, original_max_position_embeddings=16, short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                     long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
    'llama3': dict(factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
}
T = 24


def draw(seed: int) -> torch.Tensor:
  return torch.from_numpy(np.random.default_rng([seed, 1]).integers(0, SIZES['vocab_size'], (2, T)))


def save(name: str, model, inputs, found: dict, weights: bool = True):
  """A folder as transformers writes it; without weights only its config and reference."""
  path = FOLDER / 'hf' / name
  shutil.rmtree(path, ignore_errors=True)
  model.save_pretrained(path)
  (path / 'generation_config.json').unlink(missing_ok=True)
  if not weights:
    (path / 'model.safetensors').unlink()
  np.savez_compressed(path / 'reference.npz', inputs=inputs.numpy(), **{
      k: v.numpy() for k, v in found.items() if k != 'normed'})


def randomise(model, seed: int, embed: float = 0.2):
  """Every weight random, gains in [0.5, 1.5]."""
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, p in model.named_parameters():
      if p.ndim == 1:
        gain = name.endswith('weight')
        value = rng.uniform(0.5, 1.5, p.shape) if gain else 0.5 * rng.standard_normal(p.shape)
      else:
        small = 'wte' in name or 'wpe' in name or 'embeddings' in name
        value = rng.standard_normal(p.shape) * (embed if small else p.shape[-1] ** -0.5)
      p.copy_(torch.from_numpy(value.astype(np.float32)))
  return model.float().eval()


@torch.no_grad()
def main():
  for seed, (name, (family, settings)) in enumerate(CASES.items()):
    model = build(seed, family, settings)
    save(name, model, draw(seed), run(model, draw(seed)))
  for name, gates in WINDOWS.items():
    model = build(20, 'Qwen2', {**OTHERS['Qwen2'], **SIZES, 'num_hidden_layers': 4, 'sliding_window': 4, **gates})
    save(f'qwen2_window_{name}', model, draw(20), run(model, draw(20)), weights=name == 'off')
  plain = build(0, 'Llama', GQA)
  for name, rope in ROPES.items():
    config = transformers.LlamaConfig.from_dict(plain.config.to_dict() | (
        {'max_position_embeddings': 16} if name == 'dynamic' else {}))
    config.rope_parameters = {'rope_type': name.removesuffix('_set'), 'rope_theta': GQA['rope_theta'], **rope}
    config._attn_implementation = 'eager'
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(plain.state_dict())
    save(f'llama_rope_{name}', model, draw(0), run(model, draw(0)), weights=False)
  config = transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=32,
                                   attn_implementation='eager')
  model = randomise(transformers.GPT2LMHeadModel(config), 30)
  caught = {}
  model.transformer.h[-1].register_forward_hook(lambda _, __, out: caught.update(
      last=out[0] if isinstance(out, tuple) else out))
  out = model(input_ids=draw(30), output_hidden_states=True)
  states = torch.stack([*out.hidden_states[:-1], caught['last']])
  save('gpt2', model, draw(30), {'logits': out.logits, 'states': states})
  config = transformers.ViTConfig(**VIT, num_labels=7, attn_implementation='eager')
  model = randomise(transformers.ViTForImageClassification(config), 31, embed=0.5)
  size = VIT['image_size']
  images = torch.from_numpy(np.random.default_rng(31).standard_normal((2, size, size, 3)).astype(np.float32))
  save('vit', model, images, vision_run(model, images))


if __name__ == '__main__':
  main()
