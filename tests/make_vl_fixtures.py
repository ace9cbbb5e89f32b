"""What transformers computes for a tiny Qwen2.5-VL: called by make_fixtures.py.

Two rows of text: one shows two images of different, non-square size with text before, between and behind; the other one
image, and is padded. Windows are smaller than the images and do not divide them. Weights are multiples of 1/64, so that
they compress.
"""

import numpy as np
import torch
import transformers
from transformers.vision_utils import get_vision_window_index

VISION = dict(depth=3, hidden_size=16, intermediate_size=12, num_heads=2, in_channels=3, patch_size=2,
              spatial_merge_size=2, temporal_patch_size=2, window_size=8, out_hidden_size=24,
              fullatt_block_indexes=[1], hidden_act='silu')
TEXT = dict(vocab_size=47, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, rms_norm_eps=1e-5, max_position_embeddings=64, hidden_act='silu')
ROPE = dict(rope_theta=5e4, mrope_section=[2, 1, 1])
IDS = dict(image_token_id=40, video_token_id=41, vision_start_token_id=42, vision_end_token_id=43)
GRIDS = [[1, 6, 10], [1, 8, 4], [1, 4, 6]]  # (1, height, width) in patches


def build(seed: int, tie: bool):
  """A float32 model whose every weight is random."""
  text = dict(TEXT, rope_parameters={'rope_type': 'default', **ROPE}, bos_token_id=None, eos_token_id=None)
  config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tie, **IDS,
                                         attn_implementation='eager')
  model = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, p in model.named_parameters():
      if 'norm' in name or 'ln_q' in name:
        value = rng.uniform(0.5, 1.5, p.shape)
      elif 'bias' in name:
        value = 0.5 * rng.standard_normal(p.shape)
      elif 'embed_tokens' in name:
        value = 0.3 * rng.standard_normal(p.shape)
      else:  # sharp attention, so that positions and windows can be seen
        sharp = 2 if 'q_proj' in name or 'qkv' in name else 1
        value = sharp * rng.standard_normal(p.shape) / np.prod(p.shape[1:]) ** 0.5
      p.copy_(torch.from_numpy(np.round(64 * value).astype(np.float32) / 64))
  return model


def rows(seed: int):
  """(tokens, attention mask): text image text image text; text image text padding."""
  rng = np.random.default_rng([seed, 1])
  words = lambda n: rng.integers(0, 40, n).tolist()
  cells = [h * w // 4 for _, h, w in GRIDS]
  def image(n):
    return [IDS['vision_start_token_id'], *[IDS['image_token_id']] * cells[n], IDS['vision_end_token_id']]
  first = [*words(3), *image(0), *words(2), *image(1), *words(4)]
  second = [*words(2), *image(2), *words(6)]
  pad = len(first) - len(second)
  mask = [[1] * len(first), [1] * len(second) + [0] * pad]
  return torch.tensor([first, second + [0] * pad]), torch.tensor(mask)


def reference(model, seed: int) -> dict[str, torch.Tensor]:
  """Weights, inputs, embeddings of the images, positions, logits and the states of both towers."""
  tokens, mask = rows(seed)
  n = sum(h * w for _, h, w in GRIDS)
  pixels = np.random.default_rng([seed, 2]).standard_normal((n, 3 * 2 * 2 * 2))
  pixels = torch.from_numpy((np.round(16 * pixels) / 16).astype(np.float32))
  grid = torch.tensor(GRIDS)
  image = (tokens == IDS['image_token_id']).int()
  caught = {}
  last = model.model.language_model.layers[-1].register_forward_hook(
      lambda _, __, out: caught.update(last=out[0] if isinstance(out, tuple) else out))
  with torch.no_grad():
    visual = model.model.visual(pixels, grid_thw=grid, output_hidden_states=True)
    out = model(input_ids=tokens, attention_mask=mask, pixel_values=pixels, image_grid_thw=grid,
                mm_token_type_ids=image, output_hidden_states=True)
    positions, _ = model.model.get_rope_index(tokens, image, image_grid_thw=grid, attention_mask=mask)
    window_index, _ = get_vision_window_index(grid, 2, VISION['window_size'], VISION['patch_size'])
  last.remove()
  back = torch.argsort(window_index)
  in_order = lambda x: x.reshape(len(back), 4, -1)[back].reshape(len(x), -1)
  return {
      **{f'weight/{name}': p for name, p in model.state_dict().items()}, 'tokens': tokens, 'mask': mask,
      'pixels': pixels, 'grid': grid, 'images': visual.pooler_output, 'positions': positions, 'logits': out.logits,
      'vision_states': torch.stack([in_order(x) for x in visual.hidden_states]),
      'text_states': torch.stack([*out.hidden_states[:-1], caught['last']]),
  }


def fixtures(seed: int):
  """(name, arrays, how to read them) of each fixture."""
  meta = dict(text=TEXT, vision=VISION, rope=ROPE, ids=IDS)
  found = reference(build(seed, tie=False), seed)
  states = {k: found.pop(k) for k in ('vision_states', 'text_states', 'images', 'logits')}
  yield 'qwen2_5_vl', found, meta
  yield 'qwen2_5_vl_states', states, {}
  yield 'qwen2_5_vl_pictures', *pictures()


# name: (height, width, seed), bounds on pixels, and which of a patch's numbers are kept
PICTURES = {'plain': ((90, 133, 0), {}, 9), 'small': ((20, 31, 1), {}, 5),
            'large': ((300, 200, 2), {'max_pixels': 28 * 28 * 20}, 9)}


def pictures():
  """(arrays, how to read them): patches of made pictures by the processor that uses PIL."""
  from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
  found, cases = {}, {}
  for name, ((h, w, seed), bounds, every) in PICTURES.items():
    y, x = np.mgrid[:h, :w]
    base = np.stack([127 + 120 * np.sin(x / 7), 127 + 120 * np.cos(y / 5), (x * y) % 256], -1)
    image = np.clip(base + np.random.default_rng(seed).normal(0, 20, (h, w, 3)), 0, 255).astype(np.uint8)
    made = Qwen2VLImageProcessorPil(**bounds)(image, return_tensors='pt')
    found |= {f'{name}/patches': made['pixel_values'][:, ::every], f'{name}/grid': made['image_grid_thw'][0]}
    cases[name] = {'size': (h, w, seed), 'bounds': bounds, 'every': every}
  return found, {'cases': cases}
