"""Settings of a model: its default, type, meaning and bounds; part of `lns_jax.config`, which everybody imports."""

import dataclasses

from lns_jax.errors import UserError, around, divisors
from lns_jax.layers import init as init_lib
from lns_jax.layers import schemes
from lns_jax.settings import Section, setting

PRECISIONS = {
    # name: (parameters, compute). `auto` becomes float32 on a CPU and bfloat16 elsewhere.
    'auto': None,
    'float32': ('float32', 'float32'),
    'bfloat16': ('float32', 'bfloat16'),
    'paper_bf16': ('bfloat16', 'bfloat16'),  # the authors' all-bf16 training, Adam moments included
    'float64': ('float64', 'float64'),  # for exactness tests, needs jax_enable_x64
}

BIASES = {
    # name: the projections that have a bias
    'none': (),
    'qkv': ('q', 'k', 'v'),  # Qwen2
    'attn': ('q', 'k', 'v', 'o'),
    'mlp': ('gate', 'up', 'down'),
    'all': ('q', 'k', 'v', 'o', 'gate', 'up', 'down'),  # GPT-2, BERT, ViT
}

TEXT = ('decoder', 'encoder')  # families that read tokens

NORMS = ('rmsnorm', 'layernorm', 'nonparametric_layernorm', 'dyt')

# Settings that say how a model is computed, and not what.
EXECUTION = ('precision', 'loop', 'remat', 'attention', 'matmul', 'microbatches')

ROPES = ('none', 'linear', 'dynamic', 'yarn', 'longrope', 'llama3')  # see lns_jax.layers.rope


@dataclasses.dataclass(frozen=True)
class RopeScaling(Section):
  """How rotary frequencies are changed for texts longer than `original_length`, see lns_jax.layers.rope."""

  NAME = 'model.rope_scaling'
  kind: str = setting('none', 'The rule, by the name that config.json has for it.', choices=ROPES)
  factor: float = setting(1.0, 'Times that texts may be longer.', above=0.0)
  original_length: int = setting(0, 'Positions before scaling; all kinds but none and linear need it.', low=0)
  low_freq_factor: float = setting(1.0, 'llama3: turns within original_length below which all is scaled.', above=0.0)
  high_freq_factor: float = setting(4.0, 'llama3: turns above which nothing is.', above=0.0)
  beta_fast: float = setting(32.0, 'yarn: turns above which nothing is scaled.', above=0.0)
  beta_slow: float = setting(1.0, 'yarn: turns below which all is.', above=0.0)
  truncate: bool = setting(True, 'yarn: whether both bounds are rounded outwards to whole frequencies.')
  mscale: float = setting(0.0, 'yarn: weight of log(factor) in the factor of cosines and sines; 0: not given.', low=0.0)
  mscale_all_dim: float = setting(0.0, 'yarn: the same of the divisor of that factor; 0: not given.', low=0.0)
  attention_factor: float = setting(0.0, 'yarn, longrope: factor of cosines and sines; 0: by factor.', low=0.0)
  short_factor: tuple[float, ...] = setting((), 'longrope: divisor of each frequency up to original_length.')
  long_factor: tuple[float, ...] = setting((), 'longrope: the same of longer texts.')

  def check(self):
    if self.kind not in ('none', 'linear') and not self.original_length:
      raise UserError(f'model.rope_scaling.kind = {self.kind} needs model.rope_scaling.original_length, the positions '
                      'that the model was trained with.')
    if self.kind == 'llama3' and self.high_freq_factor <= self.low_freq_factor:
      raise UserError(f'model.rope_scaling.high_freq_factor = {self.high_freq_factor} must be above low_freq_factor = '
                      f'{self.low_freq_factor}.')


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
  """A transformer and the placement of its norms."""

  NAME = 'model'
  family: str = setting(
      'decoder', 'decoder: tokens in, rotary positions, a next token at each; vit: images in, learned positions, one '
      'class an image; encoder: BERT, tokens in, learned positions, a norm behind the embedding; tower: the vision '
      'tower of a Qwen2.5-VL, patches in, what its decoder reads out, never trained alone.',
      choices=('decoder', 'vit', 'tower', 'encoder'))
  vocab_size: int = setting(32000, 'V: rows of the embedding and of the head.', low=2, family=TEXT)
  image_size: int = setting(224, 'Height and width of an image.', low=1, family='vit')
  patch_size: int = setting(
      16, 'Height and width of a patch, which becomes one token.', low=1, family=('vit', 'tower'))
  channels: int = setting(3, 'C: numbers of a pixel.', low=1, family=('vit', 'tower'))
  frames: int = setting(2, 'Frames that a patch spans; an image is repeated.', low=1, family='tower')
  merge: int = setting(2, 'Side of the square of patches that leave as one embedding.', low=1, family='tower')
  out_width: int = setting(3584, 'Width of the embeddings that leave: D of the decoder.', low=1, family='tower')
  window_size: int = setting(
      0, 'Height and width, in pixels, of the windows into which layers divide an image; 0: none.', low=0,
      family='tower')
  num_classes: int = setting(1000, 'Classes that the head tells apart.', low=2, family='vit')
  pooling: str = setting(
      'cls', 'What the head reads: cls, a learned token before the patches; mean, the mean of the patches alone.',
      choices=('cls', 'mean'), family='vit')
  d_model: int = setting(768, 'D: width of the residual stream.', low=1)
  d_ff: int = setting(2048, 'F: hidden width of the MLP.', low=1)
  num_layers: int = setting(12, 'L: number of blocks present.', low=1)
  num_heads: int = setting(12, 'H: query heads.', low=1)
  num_kv_heads: int = setting(0, 'K: key and value heads; 0: as many as query heads.', low=0)
  head_dim: int = setting(0, 'Width of one head; 0: d_model / num_heads.', low=0)
  mlp: str = setting(
      'swiglu', 'swiglu: down (silu(gate x) * up x); gelu: down gelu(up x), the exact GELU; gelu_tanh: its '
      'approximation by tanh (GPT-2).', choices=('swiglu', 'gelu', 'gelu_tanh'))
  bias: str = setting(
      'none', 'Projections with a bias: none, qkv (Qwen2), attn (q k v o), mlp, or all.', choices=BIASES)
  qk_norm: str = setting(
      'none', 'Norm, as `norm` says, of queries and keys before rotary positions: head: of each head (Qwen3); full: of '
      'all heads together (OLMo 2).', choices=('none', 'head', 'full'))
  clip_qkv: float = setting(0.0, 'Queries, keys and values are cut to -clip_qkv..clip_qkv (OLMo 1); 0: off.', low=0.0)
  sliding_window: int = setting(
      0, 'Keys that a query sees at most, the last ones, its own included (Mistral); 0: all of its past.', low=0,
      family='decoder')
  type_vocab_size: int = setting(
      2, 'Types of tokens, such as the first and the second text of a pair.', low=1, family='encoder')
  head: str = setting(
      'mlm', 'mlm: the token at each position (dense, GELU, norm, decoder with a bias); squad: where an answer starts '
      'and ends; none: a model of states alone.', choices=('mlm', 'squad', 'none'), family='encoder')
  window_layers: tuple[int, ...] = setting(
      (), 'Ids of the layers that sliding_window (Qwen2, Qwen3) or window_size holds for; empty: all.',
      family=('decoder', 'tower'))
  causal: bool = setting(True, 'Whether a position sees only itself and its past; an encoder sees all of its document.')
  layer_ids: tuple[int, ...] = setting((), "1-based identity of each block in the original model; empty: 1..L.")
  depth: int = setting(0, 'L of the original model, which factors refer to; 0: num_layers.', low=0)
  scheme: str = setting('pre', 'Norm placement: a row of lns_jax.layers.schemes.', choices=schemes.SCHEMES)
  p_attn: float = setting(0.5, 'Exponent p of l^-p for the attention norm.', low=0.0, high=4.0)
  p_mlp: float = setting(0.5, 'Exponent p of l^-p for the MLP norm.', low=0.0, high=4.0)
  mix_fraction: float = setting(0.25, 'Share of Post-LN layers below, rounded down.', low=0.0, high=1.0, scheme='mix')
  mix_count: int = setting(-1, 'Number of Post-LN layers at the bottom; -1: by mix_fraction.', low=-1, scheme='mix')
  alpha_init: float = setting(1.0, "Start of alpha; 1: LNS itself.", scheme='lns_learned')
  layerscale_init: float = setting(0.0, 'Start; 0: 0.1, 1e-5, 1e-6 by depth as in CaiT.', low=0.0, scheme='layerscale')
  keel_alpha: float = setting(0.0, 'Factor on the stream, which the source leaves open; 0: L.', low=0.0, scheme='keel')
  norm_groups: int = setting(0, 'Groups of channels; 0: as many as query heads.', low=0, scheme='group_ln')
  prores_steps: int = setting(1000, 'T, updates until layer 1 is whole; layer l is after T l.', low=1, scheme='prores')
  ramp_step: int = setting(-1, 'Finished updates, outside of training; -1: all of them.', low=-1, scheme='prores')
  completep_alpha: float = setting(1.0, 'Exponent of L / L0; 0.5 is depth-muP.', low=0.5, high=1.0, scheme='completep')
  base_depth: int = setting(2, 'L0, the depth at which the settings were tuned.', low=1, scheme='completep')
  base_width: int = setting(0, 'Width at which the settings were tuned; 0: this d_model.', low=0, scheme='completep')
  init: str = setting('normal', 'Initialisation: a row of lns_jax.layers.init.', choices=init_lib.INITS)
  init_std: float = setting(init_lib.STD, 'Standard deviation of the matrices at the start.', above=0.0)
  norm: str = setting('rmsnorm', 'What a norm computes, see lns_jax.layers.norms.', choices=NORMS)
  norm_eps: float = setting(1e-6, 'Added to the mean square of a norm (1e-6 the paper).', above=0.0)
  dyt_alpha: float = setting(0.5, 'Start of alpha in the norm dyt, tanh(alpha x).', above=0.0)
  positions: str = setting(
      'rotary', 'rotary: queries and keys are turned; learned: a table is added to the embedding (GPT-2).',
      choices=('rotary', 'learned'), family='decoder')
  max_positions: int = setting(
      0, 'Rows of the table of learned positions; of rotary ones the longest text that the model is for, 0: unknown.',
      low=0, family=TEXT)
  rope_base: float = setting(
      10000.0, 'Base of the rotary position embedding.', above=1.0, family=('decoder', 'tower'))
  rope_scaling: RopeScaling = setting(RopeScaling(), 'Frequencies for longer texts.', family='decoder')
  rope_sections: tuple[int, ...] = setting(
      (), 'Numbers of frequencies that turn by each axis of the positions (M-RoPE); empty: one axis.',
      family='decoder')
  tie_embeddings: bool = setting(False, 'Whether the head is the embedding.', family=TEXT)
  precision: str = setting(
      'auto', 'Types of parameters and compute; auto: by device.', choices=PRECISIONS,
      refused={'float16': 'is not offered: without loss scaling, gradients below 6e-8 would be lost, and no TPU '
                          'computes in it; bfloat16 is as small and has the range of float32.'})
  loop: str = setting(
      'unrolled', 'unrolled: static layer index; scan: one compiled body a run.', choices=('unrolled', 'scan'))
  remat: str = setting(
      'none', 'What a layer leaves for its backward pass. none: everything; names: the outputs of its projections and '
      'of attention; offload: those, in the host\'s memory (TPU, GPU); full: its input alone.',
      choices=('none', 'names', 'offload', 'full'))
  attention: str = setting(
      'auto', 'What computes attention. xla: plain products; splash: the kernel for TPUs that never holds all scores; '
      'auto: splash where platform and shape suit it.', choices=('auto', 'xla', 'splash'))
  matmul: str = setting(
      'plain', 'Products of the blocks\' matrices. plain: in the compute type; fp8: of 8-bit floats, by qwix, where '
      'the chip has them.', choices=('plain', 'fp8'))
  microbatches: int = setting(
      0, 'Parts of a batch that follow each other through the stages of a pipeline; 0: as many as stages.', low=0)

  @property
  def reads_text(self) -> bool:
    """Whether its input is tokens."""
    return self.family in TEXT

  @property
  def has_embed_norm(self) -> bool:
    """Whether what enters layer 1 is normalised: that of every encoder, and by some schemes."""
    return self.family == 'encoder' or schemes.has(self, 'embed_norm')

  @property
  def has_final_norm(self) -> bool:
    """Whether a norm lies before the head: everywhere but in an encoder whose last layer ends with one, as BERT's.

    Of the original model's last layer, so that a model with layers removed keeps its own.
    """
    return self.family != 'encoder' or not schemes.row(self, self.depth).out_norm

  @property
  def has_cls(self) -> bool:
    """Whether a token that is no part of the input comes first."""
    return self.family == 'vit' and self.pooling == 'cls'

  @property
  def num_tokens(self) -> int:
    """T of a ViT: patches, and the CLS token if there is one."""
    return (self.image_size // self.patch_size) ** 2 + self.has_cls

  def check(self):
    self._check_family()
    H = self.num_heads
    if not self.head_dim and self.d_model % H:
      raise UserError(f'model.num_heads = {H} does not divide model.d_model = {self.d_model}; '
                      f'{around(H, divisors(self.d_model))} heads would.')
    self.fill(head_dim=self.head_dim or self.d_model // H, num_kv_heads=self.num_kv_heads or H)
    self._check_positions()
    if H % self.num_kv_heads:
      raise UserError(f'model.num_kv_heads = {self.num_kv_heads} does not divide model.num_heads = {H}.')
    if self.sliding_window and not self.causal:
      raise UserError(f'model.sliding_window = {self.sliding_window} counts the keys behind a query and needs '
                      'model.causal = True; with model.causal = False only 0 is allowed.')
    self.fill(layer_ids=self.layer_ids or tuple(range(1, self.num_layers + 1)))
    self.fill(depth=self.depth or max(self.layer_ids))
    ids = self.layer_ids
    if len(ids) != self.num_layers:
      raise UserError(f'model.layer_ids names {len(ids)} layers but model.num_layers is {self.num_layers}.')
    if sorted(set(ids)) != list(ids) or ids[0] < 1 or ids[-1] > self.depth:
      raise UserError(f'model.layer_ids = {ids} must rise from at least 1 to at most model.depth = {self.depth}.')
    self._check_windows()
    self._check_scheme()

  def _check_positions(self):
    """Refuses positions that the other settings cannot have."""
    scaling = self.rope_scaling
    if self.family == 'decoder' and self.positions == 'rotary' and self.head_dim % 2:
      raise UserError(f'model.head_dim = {self.head_dim} must be even for rotary positions.')
    if self.family == 'tower' and self.head_dim % 4:
      raise UserError(f'model.head_dim = {self.head_dim} must be a multiple of 4 for rotary positions of two axes.')
    if self.rope_sections and (sum(self.rope_sections) != self.head_dim // 2 or min(self.rope_sections) < 1):
      raise UserError(f'model.rope_sections = {self.rope_sections} must be positive and add up to model.head_dim / 2 = '
                      f'{self.head_dim // 2}.')
    if self.positions == 'learned' and not self.max_positions:
      raise UserError('model.positions = learned needs model.max_positions, the rows of its table.')
    if scaling.kind != 'none' and (self.family != 'decoder' or self.positions != 'rotary'):
      raise UserError(f'model.rope_scaling.kind = {scaling.kind} scales rotary positions, which the model does not '
                      'have; it must be none.')
    if scaling.kind == 'dynamic' and self.head_dim < 4:
      raise UserError(f'model.rope_scaling.kind = dynamic needs a model.head_dim of at least 4, not {self.head_dim}.')
    if scaling.kind == 'longrope':
      for name in ('short_factor', 'long_factor'):
        factors = getattr(scaling, name)
        if len(factors) != self.head_dim // 2 or min(factors) <= 0:
          raise UserError(f'model.rope_scaling.{name} must hold {self.head_dim // 2} positive numbers, half of '
                          f'model.head_dim, but holds {len(factors)}.')

  def _check_windows(self):
    """Refuses layers with a window where there is none, or that there are not; of removed layers none are left."""
    name = 'window_size' if self.family == 'tower' else 'sliding_window'
    if self.window_layers and not getattr(self, name):
      raise UserError(f'model.window_layers = {self.window_layers} needs model.{name}.')
    outside = [l for l in self.window_layers if not 1 <= l <= self.depth]
    if outside:
      raise UserError(f'model.window_layers names layer {outside[0]}; the layers are 1 to {self.depth}.')

  def window(self, layer: int) -> int:
    """Keys that a query of the layer sees at most, or the size of its windows of an image; 0: all."""
    size = self.window_size if self.family == 'tower' else self.sliding_window
    return size if not self.window_layers or layer in self.window_layers else 0

  def _check_family(self):
    """Refuses settings that the family cannot have."""
    self.refuse_foreign(self.family)
    if self.family != 'decoder' and self.causal:
      whole = 'text' if self.family == 'encoder' else 'image'
      raise UserError(f'model.family = {self.family} sees the whole {whole}: of model.causal only False is allowed.')
    if self.family == 'encoder':
      if not self.max_positions:
        raise UserError('model.family = encoder has a learned vector for each position: model.max_positions must be '
                        'above 0, such as 512.')
      if self.tie_embeddings and self.head != 'mlm':
        raise UserError(f'model.tie_embeddings = True needs model.head = mlm; model.head = {self.head} predicts no '
                        'tokens.')
    if self.family == 'tower':
      cell = self.patch_size * self.merge
      if self.window_size and self.window_size < cell:
        raise UserError(f'model.window_size = {self.window_size} is less than model.patch_size * model.merge = {cell}, '
                        'the least that a window holds; 0 is none.')
    if self.family == 'vit':
      if self.image_size % self.patch_size:
        raise UserError(f'model.patch_size = {self.patch_size} does not divide model.image_size = {self.image_size}; '
                        f'{around(self.patch_size, divisors(self.image_size))} would.')

  def _check_scheme(self):
    """Refuses a scheme whose settings or norm it cannot have."""
    if self.mix_count > self.depth:
      raise UserError(f'model.mix_count = {self.mix_count} is more than the {self.depth} layers there are.')
    row = schemes.row(self, self.layer_ids[-1])
    if row.in_groups and self.d_model % (self.norm_groups or self.num_heads):
      raise UserError(f'model.norm_groups = {self.norm_groups or self.num_heads} does not divide model.d_model = '
                      f'{self.d_model}.')
    if row.in_groups and self.norm.endswith('layernorm') and self.d_model == (self.norm_groups or self.num_heads):
      raise UserError(f'model.norm_groups = {self.d_model} with model.norm = {self.norm} takes each channel off '
                      'itself, which leaves 0; fewer groups would not.')
    if row.completep and self.base_width and init_lib.INITS[self.init].knows_width:
      plain = [n for n, i in init_lib.INITS.items() if not i.knows_width]
      raise UserError(f'model.scheme = {self.scheme} scales the start with width, and model.init = {self.init} does so '
                      f"already; allowed are {', '.join(plain)}.")
    without = {'dyt'} if row.in_groups else {'nonparametric_layernorm'} if row.in_gain is not schemes.one else set()
    if self.norm in without:
      lacks = 'has no statistics to take over groups' if row.in_groups else 'has no gain to start'
      raise UserError(f'model.scheme = {self.scheme} with model.norm = {self.norm}: that norm {lacks}; '
                      f"allowed are {', '.join(n for n in NORMS if n not in without)}.")
