"""LLaMA-71M on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_71m --config.model.scheme=lns --workdir=runs/llama_71m_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

70.6M parameters, the smallest size of Mix-LN's Table 1: 1.1B tokens, perplexity Post-LN 35.18, DeepNorm 34.87,
Pre-LN 34.77, Mix-LN 33.12. The LNS paper has no run of this size; rate and warm-up follow its 130M script.
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=512, d_ff=1368, layers=12, heads=8, lr=1e-3, steps=10_000, warmup=1_000)
  return c
