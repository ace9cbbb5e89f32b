"""The quickstart's twin: a deep, narrow Llama on the embedded corpus.

  python experiments/pretrain.py --config=quickstart --config.model.scheme=lns --workdir=runs/quickstart_lns

`--config=quickstart:tiny` is a smoke test of the same shape of run, in seconds.

init_std is 0.02 sqrt(768 / 64): matrices of this width start with the gain that 0.02 gives LLaMA-130M. The rate is the
best for pre of 2e-3, 4e-3, 8e-3 and 1.6e-2, and as good as 1.6e-2 for lns (300 steps, one seed).
"""

from lns_jax.configs import common
from lns_jax.errors import UserError, nearest


BUDGETS = ('full', 'tiny')


def get_config(budget='full'):
  if budget not in BUDGETS:
    raise UserError(f'the quickstart has no budget {budget!r}.{nearest(budget, BUDGETS)}')
  c = common.base()
  c.model.update(vocab_size=2048, d_model=64, d_ff=176, num_layers=16, num_heads=2, loop='scan')
  c.model.update(init='paper', init_std=0.07)
  c.data.update(source='embedded', tokenizer='bpe', seq_len=128)
  c.optimizer.update(lr=8e-3, warmup_steps=20)
  c.train.update(steps=160, batch_size=16, log_every=5, layer_stats_every=10)
  c.eval.update(every=40)
  c.checkpoint.update(every=80)
  if budget == 'tiny':
    c.model.update(num_layers=4, d_model=32, d_ff=64, vocab_size=512)
    c.train.update(steps=12, batch_size=8, log_every=2, layer_stats_every=4)
    c.optimizer.warmup_steps = 2
    c.eval.update(every=0, max_tokens=8192)
    c.checkpoint.every = 5
  return c
