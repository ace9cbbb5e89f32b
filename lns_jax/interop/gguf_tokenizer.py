"""The tokenizer in a GGUF file's metadata: byte-level BPE, or SentencePiece as Llama 1 and 2 have it."""

from lns_jax.data import byte_bpe
from lns_jax.data.tokenizer_kinds import HFTokenizer, SentencePieceTokenizer, Tokenizer
from lns_jax.errors import UserError, nearest

# Types of tokens, the same numbers as SentencePiece's.
_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6
_KINDS = ('gpt2', 'llama')


def build(path, metadata: dict) -> Tokenizer | None:
  """The tokenizer of a file with this metadata, None where it has no tokens.

  Raises:
    UserError: its kind, or its way to split text before BPE, is not known.
  """
  fields = {key.removeprefix('tokenizer.ggml.'): value for key, value in metadata.items()
            if key.startswith('tokenizer.ggml.')}
  kind = fields.get('model', 'none')
  if kind in ('none', 'no_vocab'):
    return None
  if kind not in _KINDS:
    raise UserError(f'{path} has a tokenizer of kind {kind!r}, which is not known.{nearest(kind, _KINDS)}')
  count = len(fields.get('tokens', ()))
  for name in ('bos', 'eos'):
    given = fields.get(f'{name}_token_id')
    if given is not None and given >= count:
      raise UserError(f'{path} has tokenizer.ggml.{name}_token_id = {given} and {count} tokens.')
  try:
    return (_byte_level if kind == 'gpt2' else _sentencepiece)(path, metadata['general.architecture'], fields)
  except UserError:
    raise
  except Exception as error:  # the tokenizers library raises bare Exception
    raise UserError(f'{path} holds a tokenizer that cannot be read: {str(error).rstrip(".")}.') from None


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
  inner = byte_bpe.build(vocab, byte_bpe.read_merges(fields['merges']), cut, of_type(_CONTROL),
                         of_type(_USER_DEFINED))
  bos, eos = (fields.get(f'{name}_token_id', '') for name in ('bos', 'eos'))
  return HFTokenizer(inner.to_str(), name=f'gguf-{name}', bos=bos, eos=eos,
                     adds_bos=fields.get('add_bos_token', cut.bos), eos_ids=_ends(fields))


def _sentencepiece(path, arch: str, fields: dict) -> SentencePieceTokenizer:
  """The same pieces, scores and types as a SentencePiece model of its own."""
  from sentencepiece import sentencepiece_model_pb2
  model = sentencepiece_model_pb2.ModelProto()
  types = fields['token_type'].tolist()
  for piece, score, kind in zip(fields['tokens'], fields['scores'].tolist(), types, strict=True):
    model.pieces.add(piece=piece, score=score, type=kind)
  spec = model.trainer_spec
  spec.model_type, spec.vocab_size, spec.byte_fallback = spec.BPE, len(types), _BYTE in types
  spec.unk_id = fields.get('unknown_token_id', 0)
  spec.bos_id, spec.eos_id = (fields.get(f'{name}_token_id', -1) for name in ('bos', 'eos'))
  for name in ('unk', 'bos', 'eos'):
    at = getattr(spec, f'{name}_id')
    if at >= 0:
      setattr(spec, f'{name}_piece', fields['tokens'][at])
  spec.pad_id = -1
  model.normalizer_spec.name = 'identity'
  model.normalizer_spec.add_dummy_prefix = fields.get('add_space_prefix', True)
  model.normalizer_spec.remove_extra_whitespaces = fields.get('remove_extra_whitespaces', False)
  return SentencePieceTokenizer(model.SerializeToString(), name='gguf-llama', eos_ids=_ends(fields),
                                adds_bos=fields.get('add_bos_token', True))
