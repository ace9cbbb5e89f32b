"""OLMo-300M, one of the sizes of the paper's scaling figure.

  python experiments/pretrain.py --config=olmo_300m --config.model.scheme=lns --workdir=runs/olmo_300m_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For OLMo's
vocabulary give --config.data.tokenizer=FILE, its tokenizer.json; a BPE of 50,304 pieces is trained otherwise.

371.5M parameters, 319.9M without the head, which is untied. Figure 1, 20B tokens: loss Pre-LN 3.29, LNS 3.14 (read
off the plot, +-0.01; no seeds). The paper states tokens and sizes only: shape and training are those of OLMo's own
config of this name (paper.md 3.3, `configs/common.py` says where its versions differ), init normal 0.02 cut at 3 std,
which suits LNS as it is.
"""

from lns_jax.configs import common


def get_config():
  c = common.tiny_olmo(d_model=1024, layers=16, heads=16)
  return c
