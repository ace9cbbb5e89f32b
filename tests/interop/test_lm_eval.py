"""The adapter to lm-eval: first tokens, windows, splits, batches; against float64 token by token."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import hf_folders
import lns_jax
from lns_jax import sharding
from lns_jax.data import tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import likelihood
from lns_jax.interop.text_rules import TextRules
from lns_jax.models import layout
from hf_folders import words
from tiny import model, params
from tokenizer_cases import sentencepiece_model

pytest.importorskip('lm_eval')
from lm_eval.api.instance import Instance  # noqa: E402

from lns_jax.interop import lm_eval as adapter  # noqa: E402

forward = jax.jit(lns_jax.forward, static_argnums=0)
BYTES = tokenizers.byte_tokenizer()  # 256 is BOS
MODEL = dict(vocab_size=258, d_model=16, d_ff=32, num_layers=2, init_std=0.5)


def lm(tokenizer=BYTES, bos=256, length=32, config=None, p=None, **kwargs) -> adapter.Model:
  config = config or model(**MODEL)
  return adapter.Model(config, params(config) if p is None else p, tokenizer, TextRules(bos, length), **kwargs)


def instances(*args) -> list[Instance]:
  return [Instance('loglikelihood', {}, arguments, 0) for arguments in args]


def log_probabilities(config, p, ids) -> np.ndarray:
  """[T, V] float64 of one row by the unrolled loop; zeros behind it, which no token of it sees, fill up one length."""
  config = dataclasses.replace(config, loop='unrolled')
  row = np.pad(ids, (0, 48 - len(ids)))[None]
  z = np.asarray(forward(config, layout.unstack(p), row), np.float64)[0, :len(ids)]
  return z - np.log(np.sum(np.exp(z), axis=-1, keepdims=True))


def naive(config, p, before: list[int], wanted: list[int]) -> tuple[float, bool]:
  """A row of its own."""
  logp = log_probabilities(config, p, [*before, *wanted][:-1])[len(before) - 1:]
  return sum(logp[i, token] for i, token in enumerate(wanted)), bool((logp.argmax(-1) == wanted).all())


def likeliest(config, p, before: list[int], n: int) -> list[int]:
  for _ in range(n):
    before = [*before, int(log_probabilities(config, p, before)[-1].argmax())]
  return before[-n:]


PAIRS = [([256, *b'a long context of'], list(b' words')), ([256], list(b'x')), ([256, *b'ab'], list(b'c')),
         ([256, *b'ab'], list(b'd')), ([256, *b'a'], list(b'bd')), ([256, *b'ab'], list(b'cdefghijkl'))]


def test_scores_are_those_of_each_row_alone():
  config = model(**MODEL)
  p = params(config)
  pairs = [*PAIRS, ([256, *b'zz'], likeliest(config, p, [256, *b'zz'], 3))]
  found = likelihood.Scorer(config, p, max_length=64).score(pairs)
  expected = [naive(config, p, *pair) for pair in pairs]
  assert [greedy for _, greedy in found] == [greedy for _, greedy in expected] and expected[-1][1]
  np.testing.assert_allclose([nats for nats, _ in found], [nats for nats, _ in expected], rtol=1e-5)


@pytest.mark.parametrize('devices, shared', [(1, False), (4, False), (8, True)])
def test_scores_do_not_depend_on_batches_or_devices(devices, shared, monkeypatch):
  config = model(**MODEL)
  p, mesh = params(config), sharding.make_mesh
  monkeypatch.setattr(sharding, 'make_mesh', lambda settings, _=None: mesh(settings, jax.devices()[:devices]))
  where = sharding.shared(config) if shared else None
  placed = jax.device_put(p, sharding.params(where, config)) if shared else p
  expected = [naive(config, p, *pair)[0] for pair in PAIRS]
  for size in (1, 2, 3, 5, 8):
    done = []
    found = likelihood.Scorer(config, placed, max_length=64, batch_size=size, mesh=where).score(PAIRS, done.append)
    np.testing.assert_allclose([nats for nats, _ in found], expected, rtol=1e-6)
    assert sum(done) == len(PAIRS)


def test_devices_share_the_parameters():
  """Whatever device they come on: of each matrix an eighth on each of 8."""
  m = lm(p=jax.device_put(params(model(**MODEL)), jax.devices()[3]))
  for path, x in jax.tree_util.tree_leaves_with_path(m._scorer._params):
    parts = 1 if path[-1].key == 'gain' else 8
    assert len(x.sharding.device_set) == 8 and x.addressable_shards[0].data.size == x.size // parts


def test_what_is_too_long_is_cut_on_the_left():
  config = model(**MODEL)
  p = params(config)
  before, wanted = list(range(40)), list(range(40, 44))
  (found, _), = likelihood.Scorer(config, p, max_length=32).score([(before, wanted)])
  assert found == pytest.approx(naive(config, p, before[-29:], wanted)[0], rel=1e-6)  # 29 + 4 - 1 tokens are read
  short = lm(config=config, p=p)
  short.loglikelihood(instances(('y' * 40, 'z'), ('y', 'z')))
  assert short.cut == 1


def test_compiled_shapes_are_few():
  assert likelihood.lengths(200) == [32, 48, 64, 96, 128, 192, 200] and likelihood.lengths(16) == [16]
  assert [likelihood.counts(n) for n in (1, 4, 5, 16, 17, 65)] == [4, 4, 16, 16, 64, 256]


def test_a_score_that_is_not_finite_is_refused():
  config = model(**MODEL)
  scorer = likelihood.Scorer(config, params(config), max_length=32)
  with pytest.raises(UserError, match='of request 1 is nan'):
    scorer.score([([256], [1]), ([256], [999])])
  with pytest.raises(UserError, match='request 0 has 0 tokens of context'):
    scorer.score([([], [1])])


def test_the_split_of_context_and_continuation():
  """Trailing white space is the continuation's, and the tokens of the whole beyond the context's are scored."""
  m = lm()
  assert m._encode_pair('ab  ', 'c') == ([256, *b'ab'], list(b'  c'))
  joined = lm(words(), 0, config=model(**MODEL | {'vocab_size': 7}))
  assert joined._encode_pair('abc', 'd e') == ([0, 3], [4])
  assert joined._encode_pair('abcd', ' efgh') == ([0, 3, 2], [5])  # the tokenizer joins 'd' and ' e' in the whole


def test_one_bos_where_the_model_has_one():
  assert lm().tok_encode('ab') == [256, 97, 98] and lm().tok_encode('ab', add_special_tokens=False) == [97, 98]
  assert lm(bos=None).tok_encode('ab') == [97, 98] == lm(add_bos=False).tok_encode('ab')
  assert lm(bos=None, add_bos=True).tok_encode('ab') == [256, 97, 98]
  assert lm().tok_encode('<bos>ab') == [256, 97, 98] == lm(bos=None).tok_encode('<bos>ab')
  assert lm().get_model_info()['adds_bos'] and not lm(bos=None).get_model_info()['adds_bos']


def test_a_bos_that_is_spelt_is_one_of_sentencepiece_too():
  tokenizer = tokenizers.SentencePieceTokenizer(sentencepiece_model())
  adapted = lm(tokenizer, bos=tokenizer.bos_id, config=model(**MODEL | {'vocab_size': 512}))
  assert adapted.tok_encode('<s>so it is') == adapted.tok_encode('so it is') == [1, *tokenizer.encode('so it is')]


def test_a_text_without_context_stands_behind_the_first_token():
  config = model(**MODEL)
  p = params(config)
  for bos in (256, None):  # a text of its own is conditioned on BOS in either case, as in lm-eval
    found = lm(bos=bos, config=config, p=p).loglikelihood(instances(('', 'ab'), ('  ', 'ab')))
    expected = [naive(config, p, [256], list(text))[0] for text in (b'ab', b'  ab')]
    np.testing.assert_allclose([nats for nats, _ in found], expected, rtol=1e-5)


def test_what_adds_no_token_is_refused():
  with pytest.raises(UserError, match="continuation '' adds no token to its context 'a'"):
    lm().loglikelihood(instances(('a', '')))
  with pytest.raises(UserError, match=r"'...b{40}' has 50 tokens, and the model reads 32"):
    lm().loglikelihood(instances(('a', 'b' * 50)))


@pytest.mark.parametrize('T', [1, 2, 7, 8, 9, 23, 64])
def test_rolling_windows_score_each_token_once_behind_the_first(T):
  """A head of zeros gives every token the same probability; n tokens of text have n targets."""
  config = model(**MODEL, tie_embeddings=False)
  p = params(config)
  p = p | {'head': {'table': 0 * p['head']['table']}}
  found, = lm(length=8, config=config, p=p).loglikelihood_rolling(instances(('a' * T,)))
  assert found == pytest.approx(-T * math.log(258), rel=1e-6)


def test_rolling_windows_keep_as_much_context_as_fits():
  config = model(**MODEL)
  p, text = params(config), list(b'never odd or even')
  found, empty = lm(length=8, config=config, p=p).loglikelihood_rolling(instances((bytes(text).decode(),), ('',)))
  expected = naive(config, p, [256], text[:8])[0] + naive(config, p, text[7:8], text[8:16])[0]
  expected += naive(config, p, text[8:16], text[16:])[0]
  assert found == pytest.approx(expected, rel=1e-5) and empty == 0


HFLM = [  # context, continuation, and what lm-eval's own HFLM says with transformers 5.24 of the folder of `of_text`
    ('a context ', 'and more', -60.451908), ('x', ' A', -13.071929), ('x', ' B', -13.316441),
    ('', 'no context', -60.059158), ('long ' * 15, 'continuation words here', -150.370331),
    ('q\n', '\n\nz', -21.971445)]
HFLM_WHOLE = [-116.078926, -23.067242, -22.32147, -60.059158, -574.492584, -30.30676]  # both together, rolling


def test_a_folder_scores_as_lm_evals_adapter_of_transformers_scores_it(tmp_path):
  opened = adapter.Opened(str(hf_folders.of_text(tmp_path)), batch_size=3)  # of 64 positions: one context is cut
  found = opened.loglikelihood(instances(*((context, text) for context, text, _ in HFLM)))
  np.testing.assert_allclose([nats for nats, _ in found], [nats for *_, nats in HFLM], rtol=1e-6)
  assert not any(greedy for _, greedy in found) and opened.cut == 1
  whole = opened.loglikelihood_rolling(instances(*((context + text,) for context, text, _ in HFLM)))
  np.testing.assert_allclose(whole, HFLM_WHOLE, rtol=1e-6)


def test_arguments_of_another_model_are_refused(tmp_path):
  with pytest.raises(UserError, match='do not know pretrained'):
    adapter.Opened('x', pretrained='y')


def test_texts_end_before_the_strings_that_end_them_and_do_not_depend_on_batches():
  config = model(**MODEL)
  p = params(config)
  context, ids = 'ab', [256, *b'ab']
  whole = bytes(i for i in likeliest(config, p, ids, 6) if i < 256).decode(errors='replace')
  ask = lambda m, **settings: m.generate_until(
      [Instance('generate_until', {}, (text, settings), 0) for text in (context, 'another one', 'c')])
  plain = ask(lm(config=config, p=p), max_gen_toks=6, until=[])
  assert plain[0] == whole and len(set(plain)) == 3
  assert ask(lm(config=config, p=p, batch_size=2), max_gen_toks=6, until=[]) == plain
  ended = ask(lm(config=config, p=p), max_gen_toks=6, until=[whole[2]])
  assert ended[0] == whole[:whole.index(whole[2])] and ended[0] != whole
  drawn = [ask(lm(config=config, p=p, batch_size=size, seed=3), max_gen_toks=6, until=[], do_sample=True, temperature=1.0)
           for size in (1, 3)]
  assert drawn[0] == drawn[1] != plain
  with pytest.raises(UserError, match='asks for 32 new tokens, which leaves no room'):
    ask(lm(config=config, p=p), max_gen_toks=32, until=[])
