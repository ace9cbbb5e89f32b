"""Qwen3-0.6B: RMSNorm of each query and key, heads wider than D / H, tied head.

  python experiments/pretrain.py --config=qwen3_0_6b --config.model.scheme=lns --workdir=runs/qwen3_0_6b_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For Qwen's
vocabulary give --config.data.tokenizer=FILE, its tokenizer.json; a BPE of 151,936 pieces is trained otherwise.

596.0M parameters. Shape of Qwen/Qwen3-0.6B's config.json. With LNS the norms of queries and keys undo the factor
there: it acts on the values and the MLP only (a run says so). The paper only analyses Qwen3-8B and trains none: data
and training are those of `qwen2_5_0_5b` (our choice).
"""

from lns_jax.configs import common


def get_config():
  c = common.adamw(2048, lr=6e-4, steps=11_444, warmup=1_144)
  c.model.update(vocab_size=151936, d_model=1024, d_ff=3072, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128,
                 qk_norm='head', tie_embeddings=True, rope_base=1e6, norm_eps=1e-6)
  return c
