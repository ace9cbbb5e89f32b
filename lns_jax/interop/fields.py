"""Reading a config.json so that no field is passed over: each is honoured, known to be neutral, or refused by name."""

import math
from collections.abc import Iterable

from lns_jax.errors import UserError

RECORD = 'lns_jax'  # in which an export of ours says what was folded into the weights, see `fold`
LARGEST = 2 ** 31 - 1  # of a whole number: sizes, lengths and counts are far below it
MOST_LAYERS = 10_000
# Fields of every family that do not change what a model computes: names, types, what a program does around it,
# dropout, which no inference has, and starts, which loaded weights do not have.
NEUTRAL = frozenset('''
    architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id
    unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id bos_token eos_token return_dict
    output_attentions output_hidden_states output_scores return_dict_in_generate torchscript use_bfloat16 id2label
    label2id finetuning_task problem_type task_specific_params prefix name_or_path attn_implementation
    initializer_range initializer_factor attention_dropout hidden_dropout hidden_dropout_prob
    attention_probs_dropout_prob embd_pdrop attn_pdrop resid_pdrop dropout classifier_dropout pretraining_tp
    gradient_checkpointing reorder_and_upcast_attn auto_map transformers.js_config tokenizer_class
    chunk_size_feed_forward max_length min_length do_sample early_stopping num_beams temperature top_k top_p
    repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences forced_bos_token_id
    forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids remove_invalid_values
    exponential_decay_length_penalty encoder_no_repeat_ngram_size num_beam_groups diversity_penalty typical_p
    is_encoder_decoder tf_legacy_loss tie_encoder_decoder sampling_rate use_flash_attn unsloth_version unsloth_fixed
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx
    max_sequence_length
'''.split()) | {RECORD}


class Fields:
  """The fields of a config.json, each of which is to be taken once."""

  def __init__(self, values: dict, where):
    """where: the file, for messages."""
    self._values, self._where, self._taken = values, where, set()

  def take(self, name: str, default=None):
    """The value; the default where the field is missing or null."""
    self._taken.add(name)
    value = self._values.get(name)
    return default if value is None else value

  def given(self, name: str, default=None):
    """As `take`, but a null that is written there is None."""
    self._taken.add(name)
    return self._values.get(name, default)

  def number(self, name: str, default=None, kind=int):
    """A finite number. Raises UserError when it is none, or missing without a default."""
    value = self.take(name, default)
    if value is None:
      raise UserError(f'{self._where} has no field {name!r}.')
    if not is_number(value) or kind(value) != value:
      raise UserError(f'{self._where}: {name} = {value!r} is not a number of type {kind.__name__}.')
    if kind is int and abs(value) > LARGEST:
      raise self.refused(name, f'no model has more than {LARGEST}')
    return kind(value)

  def size(self, name: str, default=None, most: int = LARGEST) -> int:
    """A whole number of things that there must be."""
    value = self.number(name, default)
    if not 0 < value <= most:
      raise self.refused(name, f'it must be from 1 to {most}')
    return value

  def flag(self, name: str, default: bool) -> bool:
    """True or false."""
    return bool(self.only(name, (False, True), default))

  def group(self, name: str) -> dict:
    """A copy of an object in the file; empty where there is none."""
    value = self.take(name) or {}
    if not isinstance(value, dict):
      raise self.refused(name, 'it must be a JSON object')
    return dict(value)

  def listed(self, name: str, default=None) -> list:
    """A list; empty where there is none."""
    value = self.take(name, default) or []
    if not isinstance(value, list):
      raise self.refused(name, 'it must be a list')
    return value

  def only(self, name: str, allowed: Iterable, default):
    """The value, one of those that are understood. Raises UserError for another."""
    value, allowed = self.take(name, default), tuple(allowed)
    if value not in allowed:
      raise self.refused(name, f'understood are {", ".join(map(repr, allowed))}')
    return value

  def refused(self, name: str, why: str) -> UserError:
    """The error for a field whose value is not understood."""
    return UserError(f'{self._where}: {name} = {self._values.get(name)!r} is not supported; {why}.')

  def finish(self):
    """Refuses fields that nobody took, unless they are neutral or switched off."""
    for name, value in self._values.items():
      off = value is None or value is False or value in ([], {}, '')
      if name not in self._taken | NEUTRAL and not name.startswith('_') and not off:
        raise UserError(f'{self._where} has a field {name!r} = {str(value)[:60]} that is not known and could change '
                        'what the model computes; take it out of the file if it does not.')


def is_number(value) -> bool:
  """Whether a value of JSON is a finite number."""
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
