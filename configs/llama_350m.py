"""LLaMA-350M on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_350m --config.model.scheme=lns --workdir=runs/llama_350m_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

368.0M parameters, Table 1: perplexity Pre-LN 19.58, LNS 18.20 (no seeds; about 20.16 and 18.73 corrected for the
n/(n+1) evaluation). 7.86B token positions, printed as 6.0B tokens.
The paper's text says 1e-3 up to 350M, the script 5e-4: this file follows the text, since GPAS reports a worse
Pre-LN (20.71) at 5e-4; --config.optimizer.lr=5e-4 is the script.
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=1024, d_ff=2736, layers=24, heads=16, lr=1e-3, steps=60_000, warmup=6_000)
  return c
