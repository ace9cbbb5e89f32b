"""What the shipped configs share."""

from ml_collections import config_dict

from lns_jax import config as config_lib


def base() -> config_dict.ConfigDict:
  """All settings at their declared defaults; unknown names cannot be added."""
  return config_dict.ConfigDict(config_lib.defaults())


def paper(d_model: int, d_ff: int, layers: int, heads: int, *, lr: float, steps: int,
          warmup: int) -> config_dict.ConfigDict:
  """The authors' LLaMA pre-training (paper.md 3.1) at one size.

  512 rows of 256 tokens an update, one document a row, Adam (0.9, 0.999, 1e-8) without decay or clipping,
  linear warm-up from 0, cosine to a tenth. Embedding std 0.632 as in the code behind the published numbers,
  parameters in float32 (`--config.model.precision=paper_bf16` for the authors' all-bf16 training).
  """
  c = base()
  c.model.update(vocab_size=32000, d_model=d_model, d_ff=d_ff, num_layers=layers, num_heads=heads, init='paper')
  c.data.update(source='tfds:c4/en', tokenizer='bpe', packing='paper', seq_len=256, add_bos=False, seed=32)
  c.optimizer.update(name='adam', lr=lr, warmup_steps=warmup, schedule='cosine', final_lr_ratio=0.1)
  c.train.update(steps=steps, batch_size=512, seed=1)
  c.eval.update(every=1000, max_tokens=10_000_000)
  c.checkpoint.update(every=1000, keep=2, keep_every=10_000)
  return c


def adamw(seq_len: int, *, lr: float, steps: int, warmup: int, schedule: str = 'cosine') -> config_dict.ConfigDict:
  """What the presets beside the LLaMAs share: 2^19 tokens an update, AdamW (0.9, 0.95), decay 0.1, clipping at 1.

  2^19 is the batch of the paper's OLMo-7B curve (paper.md 3.3). Linear warm-up, then down to a tenth. Of the data the
  paper says nothing: C4 and documents packed behind a segment mask are our choice. EOS ends a document, no BOS.
  Layers are recomputed in the backward pass: the scores of long rows fill the memory otherwise.
  """
  c = base()
  c.model.update(loop='scan', remat='full')
  c.data.update(source='tfds:c4/en', tokenizer='bpe', packing='packed', seq_len=seq_len, add_bos=False)
  c.optimizer.update(name='adamw', lr=lr, warmup_steps=warmup, schedule=schedule, final_lr_ratio=0.1, b2=0.95,
                     weight_decay=0.1, clip_norm=1.0)
  c.train.update(steps=steps, batch_size=2**19 // seq_len)
  c.eval.update(every=1000, max_tokens=10_000_000)
  c.checkpoint.update(every=1000, keep=2, keep_every=10_000)
  return c


OLMO_STEPS = 38_147  # 20B tokens of 2^19 an update


def olmo(d_model: int, d_ff: int, layers: int, heads: int, *, init: str, **training) -> config_dict.ConfigDict:
  """OLMo 1: LayerNorm without gain and bias (eps 1e-5), SwiGLU, 50304 rows for the 50280 tokens of its vocabulary.

  20B tokens as in Figures 1 and 6. OLMo-60M, 1B and 7B do not clip queries, keys and values; OLMo 1.7 does, at 8
  (`--config.model.clip_qkv=8`).
  """
  c = adamw(steps=OLMO_STEPS, **training)
  c.model.update(vocab_size=50304, d_model=d_model, d_ff=d_ff, num_layers=layers, num_heads=heads,
                 norm='nonparametric_layernorm', norm_eps=1e-5, init=init)
  return c


def tiny_olmo(d_model: int, layers: int, heads: int) -> config_dict.ConfigDict:
  """OLMo's tiny sizes as paper.md 3.3 has them: rate 6e-4, decay on norms and embeddings, rows of 4096, head untied.

  OLMo's files of these names differ by version. paper.md 3.3 has RMSNorm with gain; the OLMo-60M.yaml that we read has
  LayerNorm without, as the larger sizes, a rate of 1e-3, no decay on embeddings, 2^22 tokens an update and a warm-up of
  4.2B tokens (8,000 of our updates). Adam's eps is 1e-8 here.
  LayerNorm is used here; RMSNorm is --config.model.norm=rmsnorm --config.model.norm_eps=1e-6.
  """
  c = olmo(d_model, 4 * d_model, layers, heads, init='truncated', seq_len=4096, lr=6e-4, warmup=5_000)
  c.optimizer.decay = 'all'
  return c


def vit(d_model: int, layers: int, heads: int) -> config_dict.ConfigDict:
  """ViT as timm has it: LayerNorm of 1e-6, biases everywhere, exact GELU of 4 D, CLS token; 224 x 224, patches of 16.

  The paper gives no training settings for its ViTs: these are ours, after DeiT (AdamW, 1,024 images an update, rate
  1e-3, decay 0.05, cosine). The 30,000 updates are those that Figure 8 shows.
  """
  c = base()
  c.model.update(family='vit', causal=False, norm='layernorm', norm_eps=1e-6, bias='all', mlp='gelu',
                 d_model=d_model, d_ff=4 * d_model, num_layers=layers, num_heads=heads)
  c.optimizer.update(name='adamw', lr=1e-3, warmup_steps=1_500, final_lr_ratio=0.01, weight_decay=0.05)
  c.train.update(steps=30_000, batch_size=1024)
  c.eval.update(every=1000)
  return c
