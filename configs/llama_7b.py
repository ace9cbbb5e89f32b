"""LLaMA-7B on C4 as in the LNS paper.

  python experiments/pretrain.py --config=llama_7b --config.model.scheme=lns --workdir=runs/llama_7b_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For the paper's
vocabulary give --config.data.tokenizer=FILE, the T5 SentencePiece model; a 32,000-piece BPE is trained otherwise.

6.7B parameters. A size of the authors' repository; the paper's 7B runs are OLMo's, so there is no published number
for this shape. The rate is OLMo-7B's, a tenth of the steps is warm-up (our choice).
"""

from lns_jax.configs import common


def get_config():
  c = common.paper(d_model=4096, d_ff=11008, layers=32, heads=32, lr=3e-4, steps=100_000, warmup=10_000)
  c.model.update(loop='scan', remat='full')
  return c
