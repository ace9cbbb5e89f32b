"""OLMo-1B, of the paper's scaling figure and Table 3.

  python experiments/pretrain.py --config=olmo_1b --config.model.scheme=lns --config.model.init=normal \\
    --workdir=runs/olmo_1b_lns --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For OLMo's
vocabulary give --config.data.tokenizer=FILE, its tokenizer.json; a BPE of 50,304 pieces is trained otherwise.

1176.8M parameters, tied. Table 3, 20B tokens: training loss 2.96 with OLMo's scaled init, LNS 2.85; Figure 1 has
Pre-LN 3.15, apparently with a normal init (our inference; no seeds). The paper states tokens and size only: shape
and training are those of OLMo-1B.yaml (paper.md 3.3), except that decay reaches the embedding, that an update is of
2^19 tokens, as the paper's 7B curve has it, and not of the yaml's 2^22, and that Adam's eps is 1e-8.

OLMo's init, mitchell, shrinks deep branches as LNS does: the authors recommend normal with LNS, as in the command
above, and a run that has both says so.
"""

from lns_jax.configs import common


def get_config():
  c = common.olmo(2048, 8192, layers=16, heads=16, init='mitchell', seq_len=2048, lr=4e-4, warmup=2_000)
  c.model.tie_embeddings = True
  return c
