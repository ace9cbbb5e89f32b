"""LLaMA-9M on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_9m --config.model.scheme=lns --workdir=runs/llama_9m_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

9.0M parameters. A size of the authors' repository without a run script or published number:
length and rate continue the scripts' pattern downwards (our choice).
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=128, d_ff=352, layers=4, heads=4, lr=1e-3, steps=5_000, warmup=500)
  return c
