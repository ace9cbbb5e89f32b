"""How text enters an opened model: which token stands before it, and how much of it the model reads."""

import dataclasses

from lns_jax.config import ModelConfig
from lns_jax.data.tokenizers import Tokenizer
from lns_jax.interop.load import is_run, load_run_config


@dataclasses.dataclass(frozen=True)
class Reading:
  """bos_id: token before every text; None: nothing. length: positions the model is for; 0: not known."""

  bos_id: int | None
  length: int


def of(path, config: ModelConfig, tokenizer: Tokenizer | None) -> Reading:
  """As the model was trained: of a run by its settings, of other models as their tokenizer and their config say."""
  bos = None if tokenizer is None else tokenizer.bos_id
  if is_run(path):
    data = load_run_config(path)[1].data
    return Reading(bos if data.add_bos else None, max(data.seq_len, config.max_positions))  # of an imported model more
  return Reading(bos if tokenizer is not None and tokenizer.adds_bos else None, config.max_positions)
