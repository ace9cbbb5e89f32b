"""Text and SentencePiece models for tests of tokenizers."""

import io

import sentencepiece

TEXT = 'The naïve café — “déjà vu” of 東京, 12345 times.\n\n  def f(x):\n    return x ** -0.5\t# 🙂\r\n'
CORPUS = [TEXT, 'so it is and so it was, ' * 40, 'the curse of depth in large language models. ' * 30]
LIKE_LLAMA = {'normalization_rule_name': 'identity', 'remove_extra_whitespaces': False}


def sentencepiece_model(**options) -> bytes:
  """A trained BPE of about 400 pieces, bytes among them."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(CORPUS * 20), model_writer=model, vocab_size=400, byte_fallback=True, model_type='bpe',
      hard_vocab_limit=False, minloglevel=2, **options)
  return model.getvalue()
