"""Summaries and histories such as the quickstart's, of any shape, for tests of what is made from them."""

import numpy as np


def _measures(L: int, rng) -> dict:
  angular = rng.uniform(0.01, 0.3, (L, L))
  angular[np.arange(L)[:, None] + np.arange(L) >= L] = np.nan
  measured = {'variance': 0.01 * np.cumprod(1 + rng.uniform(0, 0.2, L + 1)), 'angular': angular,
              'block_influence': rng.uniform(0.01, 0.3, L), 'layer_drop': rng.normal(0.02, 0.05, L)}
  plain = lambda v: [plain(w) for w in v] if np.ndim(v) else float(v) if np.isfinite(v) else None
  return {'layers': L, 'layer_ids': list(range(1, L + 1)), 'baseline': 4.5,
          **{k: plain(v) for k, v in measured.items()},
          'intervals': {k: {'low': plain(v - 0.1 * abs(v)), 'high': plain(v + 0.1 * abs(v))}
                        for k, v in measured.items()}}


def history(L: int, rng, steps: int = 200, stats: bool = True) -> list[dict]:
  """Records of a metrics.jsonl."""
  records = []
  for step in range(1, steps + 1, 5):
    record = {'step': step, 'loss': 7 - 0.5 * np.log(step) + rng.normal(0, 0.1)}
    if stats and step % 10 == 1:
      record |= {'variance': (0.01 * step * np.cumprod(1 + rng.uniform(0, 0.2, L + 1))).tolist(),
                 'attn_ratio': rng.uniform(0.01, 1, L).tolist(), 'mlp_ratio': rng.uniform(0.01, 1, L).tolist()}
    records.append(record)
  return [*records, {'step': steps, 'val_loss': 4.5}]


def make(names=('pre', 'lns'), L: int = 4, *, diverged=(), stats: bool = True) -> tuple[dict, dict]:
  """(summary, histories)."""
  rng = np.random.default_rng(0)
  schemes, histories = {}, {}
  for i, name in enumerate(names):
    histories[name] = history(L, rng, stats=stats)
    if name in diverged:
      schemes[name] = {'val_loss': None, 'val_perplexity': None, 'tokens': None, 'params': None, 'diverged': True,
                       'tokens_per_second': None, 'reason': 'the loss became nan at step 37, first in layer 2.'}
      histories[name] = histories[name][:8]
    else:
      schemes[name] = {**_measures(L, rng), 'val_loss': 4.5 - 0.25 * i, 'val_perplexity': 90.0, 'tokens': 409600,
                       'val_bits_per_byte': 2.0, 'val_tokens': 65536, 'params': 1067072, 'tokens_per_second': 5000.0,
                       'diverged': False}
  config = {'model': {'num_layers': L, 'd_model': 64, 'num_heads': 2, 'd_ff': 176, 'vocab_size': 2048,
                      'init': 'normal'},
            'data': {'source': 'embedded', 'seq_len': 128},
            'optimizer': {'name': 'adam', 'lr': 3e-3, 'schedule': 'cosine'}, 'train': {'batch_size': 16, 'seed': 0}}
  return {'schemes': schemes, 'config': config, 'sample': '96 rows drawn from the validation split, 12,288 tokens',
          'corpus': {'hash': '83' * 32, 'rows': {'train': 26897, 'validation': 1539}},
          'hardware': {'backend': 'cpu', 'device': 'cpu', 'devices': 1, 'cpu_cores': 2, 'cpu': 'A & B',
                       'python': '3.11'},
          'phases': {'data': 1.0, **{f'train {n}': 60.0 for n in names}}, 'seconds': 150.0}, histories
