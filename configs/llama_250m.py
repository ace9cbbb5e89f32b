"""LLaMA-250M on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_250m --config.model.scheme=lns --workdir=runs/llama_250m_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

247.4M parameters, Table 1: perplexity Pre-LN 21.92, LNS 20.35 (no seeds; about 22.59 and 20.96 corrected for the
n/(n+1) evaluation). 5.24B token positions, printed as 3.9B tokens.
Paper and script agree on all settings of this size.
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=768, d_ff=2560, layers=24, heads=16, lr=1e-3, steps=40_000, warmup=4_000)
  return c
