"""The tokenizer of an exported model, as stock transformers opens it: same ids, BOS where training had it."""

import pathlib
import shutil

from lns_jax import files
from lns_jax.config import RunConfig
from lns_jax.data import tokenizers

# What a Hugging Face folder may have of a tokenizer. Text and numbers only: nothing of it is run.
NAMES = ('tokenizer.json', 'tokenizer.model', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
         'vocab.json', 'merges.txt', 'vocab.txt', 'chat_template.jinja', 'chat_template.json')
SPECIAL = ('bos_token_id', 'eos_token_id', 'pad_token_id')


def write(folder: pathlib.Path, origin: pathlib.Path, config: dict, tokenizer: tokenizers.Tokenizer | None,
          run: RunConfig | None) -> dict:
  """Writes the files of a tokenizer.

  Args:
    origin: of the model; a Hugging Face folder's own files are taken as they are.
    config: its config.json, empty if it has none.
    run: settings of the run that trained the model, which say whether its documents began with BOS.

  Returns:
    The special ids for config.json.
  """
  if config:
    for name in NAMES:
      if (origin / name).is_file():
        shutil.copyfile(origin / name, folder / name)
    return {name: config[name] for name in SPECIAL if name in config}
  if tokenizer is None:
    return {}
  if run is not None:
    tokenizer = tokenizer.with_bos(run.data.add_bos)
  tokenizer.save(folder)
  told = files.read_json(folder / 'tokenizer_config.json') | {'add_eos_token': False}
  if isinstance(tokenizer, tokenizers.SentencePieceTokenizer):
    told |= _stock_class(tokenizer)
  if run is not None:
    told['model_max_length'] = run.data.seq_len
  files.write_json(folder / 'tokenizer_config.json', told)
  ends = list(tokenizer.eos_ids) if tokenizer.eos_ids[1:] else tokenizer.eos_id
  return {'bos_token_id': tokenizer.bos_id, 'eos_token_id': ends}


def _stock_class(tokenizer: tokenizers.SentencePieceTokenizer) -> dict:
  """The class of transformers that reads a tokenizer.model, and how."""
  from sentencepiece import sentencepiece_model_pb2
  spec = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.proto).trainer_spec
  return {'tokenizer_class': 'LlamaTokenizer' if spec.model_type == spec.BPE else 'PreTrainedTokenizerFast',
          'legacy': False, 'clean_up_tokenization_spaces': False,
          'unk_token': spec.unk_piece if spec.unk_id >= 0 else None}
