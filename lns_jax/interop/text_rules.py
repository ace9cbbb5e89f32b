"""How text enters an opened model: which token stands before it, and how much of it the model reads."""

import dataclasses

from lns_jax.config import ModelConfig
from lns_jax.data.tokenizers import Tokenizer
from lns_jax.interop.load import is_run, load_run_config

LENGTH = 2048  # positions of a model that does not say what it is for, as lm-eval's own adapters have it
SEQ_LEN = 512  # of rows of text for a model that is no run, unless it is for shorter ones


@dataclasses.dataclass(frozen=True)
class TextRules:
  """bos_id: token before every text; None: nothing. length: positions the model is for; 0: not known."""

  bos_id: int | None
  length: int


def of(path, config: ModelConfig, tokenizer: Tokenizer | None) -> TextRules:
  """As the model was trained: of a run by its settings, of other models as their tokenizer and their config say."""
  bos = None if tokenizer is None else tokenizer.bos_id
  if is_run(path):
    data = load_run_config(path)[1].data
    length = max(data.seq_len, config.max_positions)  # an imported model is for more than the rows of its run
    return TextRules(bos if data.add_bos else None, length)
  return TextRules(bos if tokenizer is not None and tokenizer.adds_bos else None, config.max_positions)
