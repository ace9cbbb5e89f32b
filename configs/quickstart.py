"""The quickstart's twin: a deep, narrow Llama on the embedded corpus.

  python experiments/pretrain.py --config=quickstart --config.model.scheme=lns --workdir=runs/quickstart_lns
"""

from lns_jax.configs import common


def get_config():
  c = common.base()
  c.model.update(vocab_size=2048, d_model=64, d_ff=176, num_layers=16, num_heads=2, init='normal', loop='scan')
  c.data.update(source='embedded', tokenizer='bpe', seq_len=128)
  c.optimizer.update(lr=3e-3, warmup_steps=20)
  c.train.update(steps=300, batch_size=16, log_every=5, layer_stats_every=10)
  c.checkpoint.update(every=100)
  return c
