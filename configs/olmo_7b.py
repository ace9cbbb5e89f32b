"""OLMo-7B, the largest of the paper's scaling figure.

  python experiments/pretrain.py --config=olmo_7b --config.model.scheme=lns --config.model.init=normal \\
    --workdir=runs/olmo_7b_lns --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For OLMo's
vocabulary give --config.data.tokenizer=FILE, its tokenizer.json; a BPE of 50,304 pieces is trained otherwise.

6888.1M parameters, untied. Figure 1, 20B tokens in 38,147 updates: loss Pre-LN 2.69, LNS 2.50 (no seeds). The paper
states tokens and size only: shape and training are those of OLMo-7B.yaml (paper.md 3.3), except that decay reaches
the embedding, that the linear schedule ends with the run, that clipping is not relaxed in the first 1,000 updates,
that an update is of 2^19 tokens, as the paper's curve has it, and that Adam's eps is 1e-8.

OLMo's init, mitchell, shrinks deep branches as LNS does: the authors recommend normal with LNS, as in the command
above, and a run that has both says so.
"""

from lns_jax.configs import common


def get_config():
  c = common.olmo(4096, 11008, layers=32, heads=32, init='mitchell', seq_len=2048, lr=3e-4, warmup=5_000,
                  schedule='linear')
  return c
