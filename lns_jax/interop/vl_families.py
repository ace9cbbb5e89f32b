"""What the config.json of a Qwen2.5-VL means in our settings, and what the tensors of its vision tower are called."""

from lns_jax.errors import UserError
from lns_jax.interop import families, names
from lns_jax.interop.families import Family, Settings
from lns_jax.interop.fields import MOST_LAYERS, Fields, is_number
from lns_jax.interop.names import Entry, Form

TEXT, VISION = 'qwen2_5_vl_text', 'qwen2_5_vl_vision'
# Fields of the whole model: ours, theirs and what transformers takes where a file has none.
IDS = {'image_id': ('image_token_id', 151655), 'video_id': ('video_token_id', 151656),
       'start_id': ('vision_start_token_id', 151652), 'end_id': ('vision_end_token_id', 151653)}


def split(config: dict, where) -> tuple[Settings, dict, dict]:
  """config.json -> (settings of VLConfig but the towers, the decoder's fields, the tower's fields).

  Files of 2025 have the decoder's fields beside those of the whole, newer ones in text_config, where the others may be
  repeated.

  Raises:
    UserError: model_type is another one, a field is not known, or there is no vision_config.
  """
  if config.get('model_type') != families.VL:
    raise UserError(f'{where}: model_type = {config.get("model_type")!r} is no {families.VL}.')
  for name, value in (('vision_config', config.get('vision_config')), ('text_config', config.get('text_config') or {})):
    if not isinstance(value, dict):
      raise UserError(f'{where} has no field {name} that is a JSON object.')
  own = {'vision_config', 'text_config', 'vision_token_id', 'quantization_config', *(name for name, _ in IDS.values())}
  whole = {name: v for name, v in config.items() if name in own}
  text = {name: v for name, v in config.items() if name not in own}
  if config.get('text_config'):
    tie = config.get('tie_word_embeddings', config['text_config'].get('tie_word_embeddings', False))
    repeated = lambda name, v: config['text_config'].get(name, v) == v and name in config['text_config']
    whole |= {name: v for name, v in text.items() if not repeated(name, v) and name != 'tie_word_embeddings'}
    text = {n: v for n, v in config['text_config'].items() if n not in own} | {'tie_word_embeddings': tie}
  families.refuse_quantised(config, where)
  fields = Fields(whole, where)
  settings = {ours: fields.number(theirs, default) for ours, (theirs, default) in IDS.items()}
  for name in ('vision_config', 'text_config', 'vision_token_id'):  # the last is a name for either kind of pad
    fields.take(name)
  fields.finish()
  return settings, _text_fields(text) | {'model_type': TEXT}, config['vision_config'] | {'model_type': VISION}


def _text_fields(text: dict) -> dict:
  """The decoder's fields with mrope_section beside the others, and a rope that is scaled no further."""
  found = {'rope_theta': 1e6, 'max_position_embeddings': 32768} | text
  for name in ('rope_scaling', 'rope_parameters'):
    rope = found.get(name) or {}
    if isinstance(rope, dict) and rope.get('mrope_section'):
      found['mrope_section'] = rope['mrope_section']
      kinds = {kind: 'default' for kind in ('type', 'rope_type') if rope.get(kind) == 'mrope'}
      found[name] = {n: v for n, v in rope.items() if n != 'mrope_section'} | kinds
  return found


def _text(f: Fields) -> Settings:
  found = families.decoder(f, kv_heads=8, eps=1e-5)
  sections = f.listed('mrope_section')
  if not sections or not all(map(is_number, sections)):
    raise f.refused('rope_scaling', 'it needs an mrope_section, a list of numbers')
  windows = families.qwen_windows(f, found['num_layers'], first=80)
  return found | windows | {'bias': 'qkv', 'rope_sections': tuple(sections)}


def _side(f: Fields, name: str, default: int) -> int:
  """A size that may be written for both axes, which must then be the same."""
  value = f.take(name, default)
  if isinstance(value, list):
    if not all(map(is_number, value)) or len(set(value)) != 1:
      raise f.refused(name, 'patches are squares')
    return int(value[0])
  return f.number(name, default)


def _tower(f: Fields) -> Settings:
  f.only('hidden_act', ('silu',), 'silu')
  patch = _side(f, 'patch_size', 14)
  f.only('spatial_patch_size', (patch,), patch)
  f.take('tokens_per_second')  # of videos alone
  rope = f.group('rope_parameters')
  if rope.pop('rope_type', 'axial') not in ('axial', 'default') or set(rope) - {'rope_theta'}:
    raise f.refused('rope_parameters', 'a tower has axial positions, with nothing but a rope_theta')
  channels = f.number('in_chans', f.number('in_channels', 3))
  f.only('in_channels', (channels,), channels)
  layers, window = f.size('depth', 32, most=MOST_LAYERS), f.number('window_size', 112)
  whole = f.listed('fullatt_block_indexes', [7, 15, 23, 31])
  windowed = tuple(i + 1 for i in range(layers) if i not in whole)
  return {
      'family': 'tower', 'causal': False, 'bias': 'all', 'norm_eps': 1e-6, 'd_model': f.number('hidden_size', 3584),
      'd_ff': f.number('intermediate_size', 3420), 'num_layers': layers, 'num_heads': f.number('num_heads', 16),
      'patch_size': patch, 'channels': channels, 'frames': _side(f, 'temporal_patch_size', 2),
      'merge': f.number('spatial_merge_size', 2), 'out_width': f.number('out_hidden_size', 3584),
      'window_size': window if windowed else 0, 'window_layers': () if len(windowed) == layers else windowed,
      'rope_base': float(rope.get('rope_theta', 10000.0))}


# [C frames P P, D], channels before frames before rows before columns <-> a convolution's [D, C, frames, P, P]
PATCHES = Form(lambda x, c: x.reshape(x.shape[0], -1).T,
               lambda x, c: x.T.reshape(-1, c.channels, c.frames, c.patch_size, c.patch_size))


def _rows() -> list[Entry]:
  at, ours = 'visual.blocks.{i}', 'layers/{l}'
  rows = [Entry('embed/patch', 'visual.patch_embed.proj.weight', PATCHES),
          Entry('final_norm/gain', 'visual.merger.ln_q.weight'),
          Entry(f'{ours}/attn_in_norm/gain', f'{at}.norm1.weight'),
          Entry(f'{ours}/mlp_in_norm/gain', f'{at}.norm2.weight')]
  for name, number in (('up', 0), ('down', 2)):
    rows += names.both(f'head/{name}', f'visual.merger.mlp.{number}', names.LINEAR)
  for number, n in enumerate('qkv'):
    rows += [Entry(f'{ours}/attn/{n}', f'{at}.attn.qkv.weight', names.HEADS_IN, (number, 3), axis=0),
             Entry(f'{ours}/attn/{n}_bias', f'{at}.attn.qkv.bias', names.AS_IS, (number, 3))]
  rows += names.both(f'{ours}/attn/o', f'{at}.attn.proj', names.HEADS_OUT)
  for n in ('gate', 'up', 'down'):
    rows += names.both(f'{ours}/mlp/{n}', f'{at}.mlp.{n}_proj', names.LINEAR)
  return rows


FAMILIES = {TEXT: Family(_text, names.LLAMA), VISION: Family(_tower, _rows(), ('visual.', ''))}
