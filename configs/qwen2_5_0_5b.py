"""Qwen2.5-0.5B as in Table 4: biases on queries, keys and values, tied head.

  python experiments/pretrain.py --config=qwen2_5_0_5b --config.model.scheme=lns --workdir=runs/qwen2_5_0_5b_lns \\
    --config.data.data_dir=DIR

where DIR holds C4 in its TFDS layout; or give --config.data.source=FOLDER, made by prepare_data.py. For Qwen's
vocabulary give --config.data.tokenizer=FILE, its tokenizer.json; a BPE of 151,936 pieces is trained otherwise.

494.0M parameters. Table 4, 6B tokens: perplexity Pre-LN 20.62, LNS 19.57 (no seeds). Shape of Qwen/Qwen2.5-0.5B's
config.json, whose sliding window is switched off. The paper states the tokens and nothing else: rows of 2048, 2^19
tokens an update (11,444 updates), the rate (OLMo's at 300M), a tenth of the run as warm-up and the init are our choice.
"""

from lns_jax.configs import common


def get_config():
  c = common.adamw(2048, lr=6e-4, steps=11_444, warmup=1_144)
  c.model.update(vocab_size=151936, d_model=896, d_ff=4864, num_layers=24, num_heads=14, num_kv_heads=2,
                 bias='qkv', tie_embeddings=True, rope_base=1e6, norm_eps=1e-6)
  return c
