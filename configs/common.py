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
