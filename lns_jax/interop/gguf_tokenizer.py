"""The tokenizer in a GGUF file's metadata: byte-level BPE, or SentencePiece as Llama 1 and 2 have it."""

import json

from lns_jax.data import byte_bpe
from lns_jax.data.tokenizers import HFTokenizer, SentencePieceTokenizer, Tokenizer
from lns_jax.errors import UserError, nearest

# Types of tokens, the same numbers as SentencePiece's.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KINDS = ('gpt2', 'llama')


def build(path, metadata: dict) -> Tokenizer | None:
  """The tokenizer of a file with this metadata, None where it has no tokens.

  Raises:
    UserError: its kind, or its way to split text before BPE, is not known.
  """
  fields = {key.removeprefix('tokenizer.ggml.'): value for key, value in metadata.items()
            if key.startswith('tokenizer.ggml.')}
  kind = fields.get('model', 'none')
  if not isinstance(kind, str) or kind not in ('none', 'no_vocab', *_KINDS):
    raise UserError(f'{path} has a tokenizer of kind {kind!r}, which is not known.{nearest(str(kind), _KINDS)}')
  if kind in ('none', 'no_vocab'):
    return None
  try:
    count = len(fields.get('tokens', ()))
    for name in ('bos', 'eos', 'eot', 'eom'):
      given = fields.get(f'{name}_token_id', 0)
      if isinstance(given, bool) or not isinstance(given, int) or (name in ('bos', 'eos') and given >= max(count, 1)):
        raise UserError(f'{path} has tokenizer.ggml.{name}_token_id = {given} and {count} tokens.')
    return (_byte_level if kind == 'gpt2' else _sentencepiece)(path, metadata['general.architecture'], fields)
  except UserError:
    raise
  except Exception as error:  # the tokenizers library raises bare Exception
    raise UserError(f'{path} holds a tokenizer that cannot be read: {_first_line(error)}.') from None


def _first_line(error: Exception) -> str:
  return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip('.')


def _ends(fields: dict) -> tuple[int, ...]:
  """Ids that end a text: of the text, a turn, a message."""
  found = (fields.get(f'{name}_token_id') for name in ('eos', 'eot', 'eom'))
  return tuple(i for i in found if i is not None)


def _byte_level(path, arch: str, fields: dict) -> HFTokenizer:
  name = fields.get('pre', 'gpt-2' if arch == 'gpt2' else None)
  if name is None:
    raise UserError(f'{path} lacks the field tokenizer.ggml.pre, which says how text is split before BPE; convert the '
                    'model again.')
  cut = byte_bpe.split(name, str(path))
  tokens, types = fields['tokens'], fields['token_type'].tolist()
  of_type = lambda kind: [token for token, t in zip(tokens, types, strict=True) if t == kind]
  vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}  # those are padding rows
  merges = fields.get('merges', [])  # no file has an empty list
  if 'merges' not in fields and any(len(token) > 1 for token in of_type(_NORMAL)):
    raise UserError(f'{path} lacks the field tokenizer.ggml.merges.')
  inner = byte_bpe.build(vocab, byte_bpe.read_merges(merges), cut, of_type(_CONTROL), of_type(_USER_DEFINED))
  bos, eos = (fields.get(f'{name}_token_id', '') for name in ('bos', 'eos'))
  return HFTokenizer(inner.to_str(), name=f'gguf-{name}', bos=bos, eos=eos,
                     adds_bos=fields.get('add_bos_token', cut.bos), eos_ids=_ends(fields))


def _sentencepiece(path, arch: str, fields: dict) -> SentencePieceTokenizer:
  """The same pieces, scores and types as a SentencePiece model of its own, and the tokens added after them."""
  from sentencepiece import sentencepiece_model_pb2
  pieces = [*zip(fields['tokens'], fields['scores'].tolist(), fields['token_type'].tolist(), strict=True)]
  added = {}
  while pieces and pieces[-1][2] in (_CONTROL, _USER_DEFINED, _UNUSED):
    token, _, kind = pieces.pop()
    if kind != _UNUSED:  # those only pad the embedding
      added[len(pieces)] = token, kind == _CONTROL
  model = sentencepiece_model_pb2.ModelProto()
  for piece, score, kind in pieces:
    model.pieces.add(piece=piece, score=score, type=kind)
  spec = model.trainer_spec
  spec.model_type, spec.vocab_size, spec.pad_id = spec.BPE, len(pieces), -1
  spec.byte_fallback = any(kind == _BYTE for _, _, kind in pieces)
  for name, key in (('unk', 'unknown'), ('bos', 'bos'), ('eos', 'eos')):
    at = fields.get(f'{key}_token_id', -1)
    own = at if at < len(pieces) else -1
    setattr(spec, f'{name}_id', own)
    if own >= 0:
      setattr(spec, f'{name}_piece', pieces[own][0])
  model.normalizer_spec.name = 'identity'
  model.normalizer_spec.add_dummy_prefix = fields.get('add_space_prefix', True)
  model.normalizer_spec.remove_extra_whitespaces = fields.get('remove_extra_whitespaces', False)
  bos, eos = (fields.get(f'{name}_token_id', '') for name in ('bos', 'eos'))
  return SentencePieceTokenizer(model.SerializeToString(), name='gguf-llama', bos=bos, eos=eos, eos_ids=_ends(fields),
                                adds_bos=fields.get('add_bos_token', True), added=added)


def fields(tokenizer: Tokenizer, rows: int) -> dict:
  """The inverse of `build`: {metadata key: value} of a tokenizer, with padding up to the model's `rows` of vocabulary.

  Raises:
    UserError: a kind that GGUF has no name for, or one that is not known.
  """
  found = _of_byte_level(tokenizer) if isinstance(tokenizer, HFTokenizer) else _of_sentencepiece(tokenizer)
  count = len(found['tokens'])
  found['tokens'] += [f'[PAD{i}]' for i in range(count, rows)]
  found['token_type'] += [_UNUSED] * (rows - count)
  if 'scores' in found:
    found['scores'] += [0.0] * (rows - count)
  ids = {'bos_token_id': tokenizer.bos_id} | dict(
      zip(('eos_token_id', 'eot_token_id', 'eom_token_id'), tokenizer.eos_ids))
  found |= {name: i for name, i in ids.items() if i is not None}
  return {f'tokenizer.ggml.{name}': value for name, value in found.items()} | {
      'tokenizer.ggml.add_bos_token': bool(tokenizer.adds_bos)}


def _of_byte_level(tokenizer: HFTokenizer) -> dict:
  import tokenizers
  inner, model = tokenizers.Tokenizer.from_str(tokenizer.text), json.loads(tokenizer.text)['model']
  name = byte_bpe.name_of(inner) if model['type'] == 'BPE' and not model.get('byte_fallback') else None
  if name is None:
    raise UserError(f'tokenizer {tokenizer.name} is no byte-level BPE that splits text in a way that GGUF has a name '
                    f'for; known are {", ".join(byte_bpe.SPLITS)}.')
  added = inner.get_added_tokens_decoder()
  by_id = {i: token for token, i in inner.get_vocab(with_added_tokens=True).items()}
  ids = range(tokenizer.vocab_size)
  kinds = [_UNUSED if i not in by_id else _NORMAL if i not in added else _CONTROL if added[i].special else _USER_DEFINED
           for i in ids]
  merges = [m if isinstance(m, str) else ' '.join(m) for m in model['merges']]
  return {'model': 'gpt2', 'pre': name, 'tokens': [by_id.get(i, f'[PAD{i}]') for i in ids], 'token_type': kinds,
          'merges': merges}


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict:
  from sentencepiece import sentencepiece_model_pb2
  model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.proto)
  spec, normalizer = model.trainer_spec, model.normalizer_spec
  if spec.model_type != spec.BPE or normalizer.precompiled_charsmap:
    raise UserError(f'tokenizer {tokenizer.name} is a SentencePiece model that is no BPE or changes characters, which '
                    'GGUF has no name for.')
  added = [tokenizer.added.get(i, (f'[PAD{i}]', None)) for i in range(len(model.pieces), tokenizer.vocab_size)]
  kinds = {None: _UNUSED, True: _CONTROL, False: _USER_DEFINED}
  return {'model': 'llama', 'tokens': [p.piece for p in model.pieces] + [token for token, _ in added],
          'scores': [p.score for p in model.pieces] + [0.0] * len(added),
          'token_type': [p.type for p in model.pieces] + [kinds[special] for _, special in added],
          'unknown_token_id': spec.unk_id, 'add_space_prefix': normalizer.add_dummy_prefix,
          'remove_extra_whitespaces': normalizer.remove_extra_whitespaces}
