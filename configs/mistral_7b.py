"""Mistral-7B: grouped keys and a sliding window of 4096.

  python experiments/pretrain.py --config=mistral_7b --config.model.scheme=lns --workdir=runs/mistral_7b_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For Mistral's
vocabulary give --config.data.tokenizer=FILE, its tokenizer.json; a BPE of 32,000 pieces is trained otherwise.

7241.7M parameters. Shape of mistralai/Mistral-7B-v0.1's config.json. The paper (its first version) only analyses it:
20B tokens in rows of 8192, so that the window matters, and OLMo-7B's rate are our choice. Its scores take 8.6 GB a
row: split the heads, --config.mesh.tensor=8.
"""

from lns_jax.configs import common


def get_config():
  c = common.adamw(8192, lr=3e-4, steps=common.OLMO_STEPS, warmup=5_000)
  c.data.add_bos = True
  c.model.update(vocab_size=32000, d_model=4096, d_ff=14336, num_layers=32, num_heads=32, num_kv_heads=8,
                 sliding_window=4096, norm_eps=1e-5)
  return c
