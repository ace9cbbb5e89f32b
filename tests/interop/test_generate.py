"""Generation: greedy as transformers, draws as their distribution says, rows that do not know of each other."""

import jax
import numpy as np
import pytest

import hf_fixtures
from lns_jax import sharding
from lns_jax.config import RopeScaling
from lns_jax.errors import UserError
from lns_jax.interop import generate
from tiny import model, params

CONFIG = model(d_model=16, d_ff=32)
PARAMS = params(CONFIG)
PROMPTS = [[5, 6, 7], [9, 1, 2, 3, 4, 8], [17]]


def written(prompts=PROMPTS, max_new=6, **settings):
  return generate.generate(CONFIG, PARAMS, prompts, max_new=max_new, **settings)


@pytest.mark.parametrize('name', ['llama_gqa', 'llama_mha_tied', 'llama_mqa'])
def test_greedy_is_that_of_transformers(name):
  config, p, tokens, found = hf_fixtures.model(name)
  prompt, greedy = hf_fixtures.fixture(name)[0]['prompt'], found['greedy']
  new = generate.generate(config, p, tokens[:, :prompt].tolist(), max_new=greedy.shape[1] - prompt)
  np.testing.assert_array_equal(new, greedy[:, prompt:])


def test_a_row_is_as_alone_greedy_and_drawn():
  for settings in ({}, {'temperature': 1.0, 'seed': 3}, {'temperature': 1.5, 'top_k': 50, 'top_p': 0.95, 'seed': 1}):
    together = written(**settings)
    assert [len(ids) for ids in together] == [6, 6, 6]
    for i, prompt in enumerate(PROMPTS):
      assert written([prompt], rows=[i], **settings) == [together[i]]


def test_seeds_and_rows_differ_and_repeat():
  same = [[5, 6, 7]] * 2
  first, again, other = (written(same, 12, temperature=1.0, seed=s) for s in (0, 0, 1))
  assert first == again and first != other and first[0] != first[1]


def numpy_cut(logits, temperature, top_k, top_p):
  """Probabilities in float64: temperature, then the k likeliest, then the fewest that have p together."""
  z = np.asarray(logits, np.float64) / temperature
  order = np.argsort(-z)
  kept = order[:top_k or None]
  p = np.exp(z[kept] - z[kept].max())
  p /= p.sum()
  enough = np.searchsorted(np.cumsum(p), top_p) + 1
  found = np.zeros_like(z)
  found[kept[:enough]] = p[:enough] / p[:enough].sum()
  return found


@pytest.mark.parametrize('how', [
    (1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7), (2.0, 8, 0.6), (1.0, 1, 1.0), (1.0, 0, 1e-6),
    (1.0, 999, 0.9)])
def test_the_cut_is_temperature_then_k_then_p(how):
  logits = np.random.default_rng(0).normal(0, 2, (1, 32)).astype(np.float32)
  found = jax.nn.softmax(generate.cut(logits, generate.Sampling(*how)), axis=-1)
  np.testing.assert_allclose(found[0], numpy_cut(logits[0], *how), atol=1e-6)


def test_the_cut_of_numbers_by_hand():
  logits = np.log(np.array([[0.5, 0.1, 0.3, 0.1]], np.float32))
  probabilities = lambda *how: np.asarray(jax.nn.softmax(generate.cut(logits, generate.Sampling(*how)), axis=-1)[0])
  np.testing.assert_allclose(probabilities(1.0, 2, 1.0), [0.625, 0, 0.375, 0], atol=1e-6)
  np.testing.assert_allclose(probabilities(1.0, 0, 0.75), [0.625, 0, 0.375, 0], atol=1e-6)
  # of the two likeliest, 0.625 and 0.375, the first is enough for 0.6; of all four it would not be
  np.testing.assert_allclose(probabilities(1.0, 2, 0.6), [1, 0, 0, 0], atol=1e-6)
  np.testing.assert_allclose(probabilities(1.0, 0, 0.6), [0.625, 0, 0.375, 0], atol=1e-6)
  # equals of the k-th stay, as in transformers
  np.testing.assert_allclose(probabilities(1.0, 3, 1.0), [0.5, 0.1, 0.3, 0.1], atol=1e-6)


def test_draws_follow_the_distribution():
  logits = np.random.default_rng(1).normal(0, 1.5, 12).astype(np.float32)
  how, n = generate.Sampling(0.8, 8, 0.9), 20_000
  drawn = generate.choose(np.tile(logits, (n, 1)), 7, np.arange(n), 0, how=how)
  expected = numpy_cut(logits, 0.8, 8, 0.9)
  counts = np.bincount(drawn, minlength=12)
  assert (counts[expected == 0] == 0).all()
  kept = expected > 0
  chi2 = np.sum((counts[kept] - n * expected[kept]) ** 2 / (n * expected[kept]))
  assert chi2 < 26.1  # 0.1 % of draws with 8 degrees of freedom or fewer are above


def test_eos_and_stop_end_a_row_and_not_the_others():
  plain = written()
  eos = plain[0][2]
  at = [row.index(eos) if eos in row else 6 for row in plain]
  assert written(eos_id=eos) == [row[:n] for row, n in zip(plain, at)]
  assert written(eos_id=[eos, 255]) == [row[:min(n, *(row.index(255) if 255 in row else 6,))]
                                        for row, n in zip(plain, at)]
  steps = list(generate.stream(CONFIG, PARAMS, PROMPTS, max_new=6, eos_id=eos))
  assert [step[0] for step in steps][:3] == [*plain[0][:2], None]
  assert written(stop=lambda ids: len(ids) == 2 + (ids[0] == plain[1][0])) == [
      row[:3 if row[0] == plain[1][0] else 2] for row in plain]


def test_every_step_is_told():
  told = []
  found = written(tick=told.append)
  assert [list(row) for row in zip(*told)] == found


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
  prompt = np.random.default_rng(0).integers(0, 256, 40).tolist()
  whole = written([prompt, [3, 4]], 3)
  monkeypatch.setattr(generate, 'PIECE', 16)
  assert written([prompt, [3, 4]], 3) == whole


def test_both_loops_write_the_same():
  scanned = model(d_model=16, d_ff=32, loop='scan')
  assert generate.generate(scanned, params(scanned), PROMPTS, max_new=6) == written()


def test_parameters_shared_by_devices_write_the_same():
  shared = jax.device_put(PARAMS, sharding.share(CONFIG))
  assert generate.generate(CONFIG, shared, PROMPTS, max_new=6) == written()


def test_nothing_to_do():
  assert written([]) == [] and written(max_new=0) == [[], [], []]


@pytest.mark.parametrize('changes, words', [
    (dict(prompts=[[1], []]), 'prompt 2 has no token'),
    (dict(prompts=[[1, 256]]), 'prompt 1 holds token 256, .* 0 to 255'),
    (dict(prompts=[[-1]]), 'token -1'),
    (dict(max_new=-1), 'max_new = -1 must be at least 0'),
    (dict(top_p=0.0), 'top_p = 0.0 must be above 0'),
    (dict(top_k=-2), 'top_k = -2'),
    (dict(temperature=float('nan')), 'temperature = nan'),
])
def test_mistakes(changes, words):
  with pytest.raises(UserError, match=words):
    written(**changes)


@pytest.mark.parametrize('settings, words', [
    (dict(positions='learned', max_positions=8), 'a prompt of 6 tokens and 3 new ones are more than 8'),
    (dict(rope_scaling=RopeScaling('dynamic', factor=2.0, original_length=8)),
     'more than 8, where rope_scaling dynamic'),
])
def test_a_text_longer_than_positions_serve_is_refused(settings, words):
  config = model(d_model=16, d_ff=32, **settings)
  p = params(config)
  assert len(generate.generate(config, p, PROMPTS, max_new=2)[1]) == 2
  with pytest.raises(UserError, match=words):
    generate.generate(config, p, PROMPTS, max_new=3)


def test_logits_that_are_no_numbers_are_refused():
  broken = {**PARAMS, 'final_norm': {'gain': PARAMS['final_norm']['gain'] * np.nan}}
  with pytest.raises(UserError, match='logits of row 1 are not finite at its new token 1'):
    generate.generate(CONFIG, broken, PROMPTS, max_new=2)
