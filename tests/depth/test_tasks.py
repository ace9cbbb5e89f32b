"""Accuracies as scores: by hand, and as a computation question by question finds them."""

import dataclasses
import json

import numpy as np
import pytest

import lns_jax
from lns_jax import depth
from lns_jax.data import choices, tokenizers
from lns_jax.depth import interventions, tasks
from lns_jax.errors import UserError
from lns_jax.models import layout
from tiny import batch, model, params

BYTES = tokenizers.byte_tokenizer()
MODEL = dict(vocab_size=258, d_model=16, d_ff=32, init_std=0.3)


def forward(config, p, tokens, **kwargs):
  """Logits as float64, op by op: models with other layers then share what is compiled."""
  config = dataclasses.replace(config, loop='unrolled')
  return np.asarray(lns_jax.forward(config, layout.unstack(p), tokens, **kwargs), np.float64)


def questions(tmp_path, number=44, seed=0):
  """Questions of random letters with two to four choices."""
  rng = np.random.default_rng(seed)
  word = lambda: ''.join(rng.choice(list('abcdefgh'), rng.integers(1, 6)))
  path = tmp_path / 'q.jsonl'
  with open(path, 'w') as file:
    for _ in range(number):
      k = int(rng.integers(2, 5))
      record = {'context': word(), 'choices': [word() for _ in range(k)], 'answer': int(rng.integers(k))}
      file.write(json.dumps(record) + '\n')
  return path, choices.read(path, BYTES, 32, bos=256)


def batches(found, size=20):
  """Batches of `size` questions; the last is filled up with padding."""
  rows, B = list(found.rows), size * found.choices
  rows += [{k: np.zeros_like(v) for k, v in rows[0].items()}] * (-len(rows) % B)
  return [{k: np.stack([r[k] for r in rows[at:at + B]]) for k in rows[0]} for at in range(0, len(rows), B)]


def naive(config, p, path):
  """Share of questions answered right: every choice a row of plain text, float64 log-probabilities of its bytes."""
  records = [json.loads(line) for line in path.read_text().splitlines()]
  texts = [(n, b'\0' + r['context'].encode(), b' ' + c.encode()) for n, r in enumerate(records) for c in r['choices']]
  ids = np.zeros((len(texts), 16), np.int32)  # what comes behind a text changes nothing in it
  for row, (_, before, behind) in zip(ids, texts):
    row[:len(before + behind)] = [256, *(before + behind)[1:]]
  z = forward(config, p, ids)
  logp = z - np.log(np.sum(np.exp(z), axis=-1, keepdims=True))
  scores = [[] for _ in records]
  for i, (n, before, behind) in enumerate(texts):
    scores[n].append(sum(logp[i, len(before) - 1 + j, token] for j, token in enumerate(behind)))
  return np.mean([int(np.argmax(s)) == r['answer'] for s, r in zip(scores, records)])


def silenced(config, p, layer):
  """The parameters with a layer that adds nothing."""
  p = layout.unstack(p)
  own = p['layers'][layer]
  own = own | {sub: own[sub] | {matrix: 0 * own[sub][matrix]} for sub, matrix in (('attn', 'o'), ('mlp', 'down'))}
  return layout.native(p | {'layers': p['layers'] | {layer: own}}, config)


def test_accuracy_of_next_tokens_by_hand():
  logits = np.zeros((2, 3, 4), np.float32)
  logits[0, 0, 2] = logits[0, 1, 1] = logits[1, 0, 3] = 1  # the others tie: the first token is the answer
  targets = np.array([[2, 3, 0], [3, 1, -100]])
  right, w = tasks.accuracy(logits, {'tokens': targets, 'targets': targets,
                                     'segment_ids': np.array([[1, 1, 1], [1, 1, 0]])})
  assert (right.tolist(), w.tolist()) == ([2, 1], [3, 2])
  right, w = tasks.accuracy(logits, {'tokens': targets, 'targets': targets,
                                     'weights': np.array([[0.5, 2, 0], [3, 1, 0]], np.float32)})
  assert (right.tolist(), w.tolist()) == ([0.5, 3], [2.5, 4])


def test_accuracy_of_classes_by_hand():
  b = {'images': np.zeros((3, 2, 2, 1)), 'labels': np.array([1, 1, 1]), 'weights': np.array([1.0, 1.0, 0.0])}
  right, w = tasks.accuracy(np.eye(3, dtype=np.float32), b)
  assert (right.tolist(), w.tolist()) == ([0, 1, 0], [1, 1, 0])


@pytest.mark.parametrize('fault', ['logits', 'target'])
def test_what_has_no_accuracy_is_not_counted_as_wrong(fault):
  logits, targets = np.zeros((1, 2, 4), np.float32), np.array([[0, 7 if fault == 'target' else 0]])
  logits[0, 1, 2] = np.nan if fault == 'logits' else 0
  assert np.isnan(tasks.accuracy(logits, {'tokens': targets, 'targets': targets})[0]).all()


def test_accuracy_counts_the_targets_of_the_loss():
  config, b = model(**MODEL, num_layers=2), batch(rows=5)
  p = params(config)
  found = depth.layer_drop(config, p, [b], score_fn=tasks.accuracy)
  real = b['segment_ids'] > 0
  def share(config, p):
    z = forward(config, p, b['tokens'], segment_ids=b['segment_ids'])
    return float(np.mean((z.argmax(-1) == b['targets'])[real]))
  assert found['baseline'].tokens == real.sum()
  assert found['baseline'].value == pytest.approx(share(config, p), abs=1e-12)
  without = [share(*lns_jax.remove_layers(config, p, [l])) - share(config, p) for l in config.layer_ids]
  np.testing.assert_allclose(found['layer_drop'].value, without, atol=1e-12)
  assert found.keys() == {'baseline', 'layer_drop'}  # 'removable' and 'last_third' are about the loss


def test_choices_by_hand():
  """Two questions of up to three choices: the less likely real choice is never beaten by one that is not there."""
  logits, w = np.zeros((6, 2, 4), np.float32), np.ones((6, 2), np.float32)
  logits[0, :, 1] = 2.0  # the first choice of the first question is likelier than its second; it has no third
  w[2] = 0
  w[3, 1] = 0  # one token of uniform logits is likelier than two
  b = {'tokens': np.zeros((6, 2), int), 'targets': np.ones((6, 2), int), 'weights': w,
       'right': np.array([1, 0, 0, 1, 0, 0], np.float32)}
  right, weight = tasks.choice(3)(logits, b)
  assert (right.tolist(), weight.tolist()) == ([1, 1], [1, 1])
  right, weight = tasks.choice(3)(logits, b | {'right': np.array([0, 1, 0, 0, 0, 1], np.float32)})
  assert (right.tolist(), weight.tolist()) == ([0, 0], [1, 1])
  right, weight = tasks.choice(3)(logits, b | {'weights': np.concatenate([w[:3], 0 * w[:3]])})
  assert (right.tolist(), weight.tolist()) == ([1, 0], [1, 0])  # a question of padding counts nothing
  logits[1] = np.nan
  assert np.isnan(tasks.choice(3)(logits, b)[0]).tolist() == [True, False]


@pytest.mark.parametrize('loop', ['unrolled', 'scan'])
def test_each_question_scores_as_it_does_alone(tmp_path, loop):
  path, found = questions(tmp_path)
  config = model(**MODEL, num_layers=3, scheme='lns', loop=loop)
  p, score = params(config), tasks.choice(found.choices)
  assert found.choices == 4
  whole = naive(config, p, path)
  drop = depth.layer_drop(config, p, batches(found), score_fn=score)
  assert drop['baseline'].value == pytest.approx(whole, abs=1e-12) and drop['baseline'].tokens == len(found)
  blocks = depth.block_drop(config, p, batches(found), score_fn=score)['block_drop'].value
  expected = {ids: naive(*lns_jax.remove_layers(config, p, ids), path) - whole
              for ids in ((1,), (2,), (3,), (1, 2), (2, 3))}
  assert len(set(expected.values())) > 2
  np.testing.assert_allclose(drop['layer_drop'].value, [expected[l,] for l in (1, 2, 3)], atol=1e-12)
  np.testing.assert_allclose(blocks[1, :2], [expected[1, 2], expected[2, 3]], atol=1e-12)


def test_how_questions_lie_in_batches_changes_nothing(tmp_path):
  _, found = questions(tmp_path)
  config = model(**MODEL, num_layers=2)
  p, score = params(config), tasks.choice(found.choices)
  plan = interventions.Plan.of('skip', [0, 1], [1, 2])
  whole, parts = (interventions.run(config, p, batches(found, n), plan, score_fn=score) for n in (44, 20))
  for a, b in zip(whole, parts):
    np.testing.assert_array_equal(a.each()[0], b.each()[0])


def test_a_layer_that_does_nothing_costs_exactly_nothing(tmp_path):
  _, found = questions(tmp_path)
  config = model(**MODEL, num_layers=3, scheme='lns')
  p = silenced(config, params(config), '2')
  for score, data in ((tasks.choice(found.choices), batches(found)), (tasks.accuracy, [batch(vocab=258)])):
    drop = depth.layer_drop(config, p, data, score_fn=score)['layer_drop']
    assert drop.value[1] == drop.low[1] == drop.high[1] == 0.0
    sub = depth.sublayer_drop(config, p, data, score_fn=score)
    assert sub['attn_drop'].value[1] == sub['mlp_drop'].value[1] == 0.0


def test_pruning_keeps_accuracy_as_long_as_it_can(tmp_path):
  path, found = questions(tmp_path)
  config = model(**MODEL, num_layers=3)
  p = params(config)
  pruned = depth.prune(config, p, batches(found), score_fn=tasks.choice(found.choices), lower_is_better=False)
  gone, whole = [], naive(config, p, path)
  for rise in pruned.rise.value:
    scores = {l: naive(*lns_jax.remove_layers(config, p, [*gone, l]), path)
              for l in config.layer_ids if l not in gone}
    gone.append(max(scores, key=scores.get))  # of equal ones the first
    assert rise == pytest.approx(scores[gone[-1]] - whole, abs=1e-12)
  assert list(pruned.order) == gone and pruned.prunable is None


def test_a_model_that_is_broken_has_no_accuracy(tmp_path):
  _, found = questions(tmp_path, number=3)
  config = model(**MODEL)
  p = params(config)
  p = {**p, 'final_norm': {'gain': p['final_norm']['gain'] * np.nan}}
  with pytest.raises(UserError, match='score of the whole model is not finite at sequence 0'):
    depth.layer_drop(config, p, batches(found), score_fn=tasks.choice(found.choices))
