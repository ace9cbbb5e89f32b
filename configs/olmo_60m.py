"""OLMo-60M, one of the sizes of the paper's scaling figure.

  python experiments/pretrain.py --config=olmo_60m --config.model.scheme=lns --workdir=runs/olmo_60m_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For OLMo's
vocabulary give --config.data.tokenizer=FILE, its tokenizer.json; a BPE of 50,304 pieces is trained otherwise.

85.1M parameters, 59.3M without the head, which is untied. Figure 1, 20B tokens: loss Pre-LN 3.67, LNS 3.56 (read
off the plot, +-0.01; no seeds). The paper states tokens and sizes only: shape and training are those of OLMo's own
config of this name (paper.md 3.3, `configs/common.py` says where its versions differ), init normal 0.02 cut at 3 std,
which suits LNS as it is.
"""

from lns_jax.configs import common


def get_config():
  c = common.tiny_olmo(d_model=512, layers=8, heads=8)
  return c
