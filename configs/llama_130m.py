"""LLaMA-130M on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_130m --config.model.scheme=lns --workdir=runs/llama_130m_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

134.1M parameters, Table 1: perplexity Pre-LN 26.73, LNS 25.76 (no seeds, n/(n+1) evaluation: about 26.84 and
25.86 corrected). 2.62B token positions, printed in the paper as 2.2B tokens.
Paper and script agree on all settings of this size.
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=768, d_ff=2048, layers=12, heads=12, lr=1e-3, steps=20_000, warmup=2_000)
  return c
