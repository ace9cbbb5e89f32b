"""The tokenizer of an exported model, as stock transformers opens it: same ids, BOS where training had it."""

import json
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
  tokenizer.save(folder)
  add_bos = tokenizer.adds_bos if run is None else tokenizer.bos_id is not None and run.data.add_bos
  told = {'add_bos_token': add_bos, 'add_eos_token': False}
  if isinstance(tokenizer, tokenizers.HFTokenizer):
    _put_bos(folder / 'tokenizer.json', tokenizer if add_bos else None)
    told = json.loads((folder / 'tokenizer_config.json').read_text()) | told
  else:
    told |= _sentencepiece(tokenizer)
  if run is not None:
    told['model_max_length'] = run.data.seq_len
  files.write_json(folder / 'tokenizer_config.json', told)
  ends = list(tokenizer.eos_ids) if tokenizer.eos_ids[1:] else tokenizer.eos_id
  return {'bos_token_id': tokenizer.bos_id, 'eos_token_id': ends}


def _put_bos(path: pathlib.Path, tokenizer: tokenizers.HFTokenizer | None):
  """Makes a tokenizer.json put its BOS before a text, or, of None, nothing."""
  found = json.loads(path.read_text(encoding='utf-8'))
  found['post_processor'] = None
  if tokenizer is not None:
    bos = {'SpecialToken': {'id': tokenizer.bos, 'type_id': 0}}
    a, b = ({'Sequence': {'id': name, 'type_id': i}} for i, name in enumerate('AB'))
    found['post_processor'] = {
        'type': 'TemplateProcessing', 'single': [bos, a], 'pair': [bos, a, b],
        'special_tokens': {tokenizer.bos: {'id': tokenizer.bos, 'ids': [tokenizer.bos_id], 'tokens': [tokenizer.bos]}}}
  path.write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding='utf-8')


def _sentencepiece(tokenizer: tokenizers.SentencePieceTokenizer) -> dict:
  """Fields of tokenizer_config.json for a tokenizer.model."""
  from sentencepiece import sentencepiece_model_pb2
  proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.proto)
  spec = proto.trainer_spec
  is_bpe = spec.model_type == spec.BPE
  named = {'bos_token': (tokenizer.bos_id, spec.bos_piece), 'eos_token': (tokenizer.eos_id, spec.eos_piece),
           'unk_token': (spec.unk_id, spec.unk_piece)}
  return {'tokenizer_class': 'LlamaTokenizer' if is_bpe else 'PreTrainedTokenizerFast', 'legacy': False,
          'clean_up_tokenization_spaces': False,
          **{name: piece if i is not None and i >= 0 else None for name, (i, piece) in named.items()}}
