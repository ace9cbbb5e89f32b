"""LLaMA-35M on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_35m --config.model.scheme=lns --workdir=runs/llama_35m_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

35.2M parameters. A size of the authors' repository without a run script or published number:
length and rate continue the scripts' pattern downwards (our choice).
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=384, d_ff=1024, layers=6, heads=8, lr=1e-3, steps=10_000, warmup=1_000)
  return c
