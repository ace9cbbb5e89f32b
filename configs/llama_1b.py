"""LLaMA-1B on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_1b --config.model.scheme=lns --workdir=runs/llama_1b_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

1339.1M parameters, Table 1: perplexity Pre-LN 17.02, LNS 15.71 (no seeds; about 17.26 and 15.92 corrected for the
n/(n+1) evaluation). 13.11B token positions, printed as 8.9B tokens.
The script warms up for 1,000 steps, which this file follows; GaLore and GPAS use 10,000 at this length.
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=2048, d_ff=5461, layers=24, heads=32, lr=5e-4, steps=100_000, warmup=1_000)
  c.model.update(loop='scan', remat='full')
  return c
