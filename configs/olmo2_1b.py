"""OLMo 2 1B: norms on the output of each branch, and on queries and keys.

  python experiments/pretrain.py --config=olmo2_1b --config.model.scheme=res_norm_lns \\
    --workdir=runs/olmo2_1b_lns --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For OLMo 2's
vocabulary give --config.data.tokenizer=FILE, its tokenizer.json; a BPE of 100,352 pieces is trained otherwise.

1484.9M parameters, untied. Shape of allenai/OLMo-2-0425-1B's config.json. Its scheme is res_norm, which has no input
norm to scale: res_norm_lns puts 1/sqrt(l) on the branch, lns would make it a Pre-LN model. The paper has no OLMo 2
run: 20B tokens, as for its OLMos, and OLMo-1B's rate are our choice; there is no z-loss here, which OLMo 2 has.
"""

from lns_jax.configs import common


def get_config():
  c = common.adamw(4096, lr=4e-4, steps=common.OLMO_STEPS, warmup=2_000)
  c.model.update(vocab_size=100352, d_model=2048, d_ff=8192, num_layers=16, num_heads=16, scheme='res_norm',
                 qk_norm='full', rope_base=5e5, norm_eps=1e-6, init='truncated')
  return c
