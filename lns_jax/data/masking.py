"""Rows for an encoder: [CLS] text [SEP], and of it some tokens hidden, which masked language modelling predicts.

As in BERT (arXiv 1810.04805, 3.1): 15 % of a row's tokens are predicted; of these 80 % are replaced by [MASK], 10 % by
any token of the vocabulary, and 10 % stay.
"""

from collections.abc import Iterator

import numpy as np

from lns_jax.data.order import Batch
from lns_jax.data.tokenizers import Tokenizer
from lns_jax.errors import UserError

SHARE, MASKED, RANDOM = 0.15, 0.8, 0.1
NONE = -100  # the target of a token that is not predicted


def check(tokenizer: Tokenizer, T: int, hidden: bool):
  """Refuses a tokenizer without the tokens that the rows need, and rows without room for text."""
  if T < 3:
    raise UserError(f'a row of {T} positions has no room for text between its two ends; 3 would be the fewest.')
  wanted = {'bos_id': 'first token such as [CLS]', 'eos_id': 'last token such as [SEP]'}
  for name, what in (wanted | ({'mask_id': 'mask such as [MASK]'} if hidden else {})).items():
    if getattr(tokenizer, name) is None:
      raise UserError(f'tokenizer {tokenizer.name} has no {what}, which rows for an encoder need.')


def rows(ids: np.ndarray, T: int, tokenizer: Tokenizer) -> Iterator[Batch]:
  """The tokens of a document as rows of T positions at most T - 2 of which are text: 'tokens' and 'segment_ids' [T]."""
  for at in range(0, len(ids), T - 2):
    text = ids[at:at + T - 2]
    row = {name: np.zeros(T, np.int32) for name in ('tokens', 'segment_ids')}
    row['tokens'][:len(text) + 2] = [tokenizer.bos_id, *text, tokenizer.eos_id]
    row['segment_ids'][:len(text) + 2] = 1
    yield row


def hide(row: Batch, tokenizer: Tokenizer, *, seed: int, number: int) -> Batch:
  """A row of `rows` with tokens hidden, the same for the same seed and number of the row.

  Returns:
    'tokens', 'segment_ids', 'targets' int32 [T] (the hidden tokens, NONE elsewhere), 'weights' float32 [T] (1 on them).
  """
  rng = np.random.default_rng([seed, number])
  n = int(row['segment_ids'].sum()) - 2  # neither end is ever hidden
  hidden = 1 + rng.choice(n, max(round(SHARE * n), 1), replace=False)
  fate, other = rng.random(len(hidden)), rng.integers(0, tokenizer.vocab_size, len(hidden))
  tokens, targets = row['tokens'].copy(), np.full_like(row['tokens'], NONE)
  targets[hidden] = tokens[hidden]
  tokens[hidden] = np.select([fate < MASKED, fate < MASKED + RANDOM], [tokenizer.mask_id, other], tokens[hidden])
  return row | {'tokens': tokens, 'targets': targets, 'weights': (targets != NONE).astype(np.float32)}
