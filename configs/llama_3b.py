"""LLaMA-3B on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_3b --config.model.scheme=lns --workdir=runs/llama_3b_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

2.7B parameters. A size of the authors' repository without a run script or published number: rate as at 1B, a tenth
of the steps as warm-up (our choice).
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=2560, d_ff=6848, layers=32, heads=32, lr=5e-4, steps=100_000, warmup=10_000)
  c.model.update(loop='scan', remat='full')
  return c
