"""The study of a Qwen2.5-VL's layers: it measures what removing each layer gives, and goes on where it was."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

import vl_tiny
from lns_jax import vl_layers
from lns_jax.data import mmmu, tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import vl as vl_interop
from lns_jax.models import vl

EIGHT = list('abcdefgh')
ITEMS = [  # the first two: answers that the removal of some layers of either tower changes
    {'question': 'What is it?', 'options': EIGHT, 'answer': 'D', 'images': ['0.png']},
    {'question': 'Is it red?', 'options': str(EIGHT), 'answer': 'F', 'images': '5.png'},
    {'question': 'Write it.', 'question_type': 'open', 'answer': '42', 'images': ['0.png']},
    {'question': 'No picture here.', 'options': ['x', 'y', 'z'], 'answer': 'B', 'images': []},
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """(Hugging Face folder of a tiny model with a byte tokenizer, file of questions)."""
  root = tmp_path_factory.mktemp('vl')
  vl_tiny.write(root / 'model', vocab=300, first_id=290, spread=0.5)
  tokenizers.byte_tokenizer().save(root / 'model')
  (root / 'model' / 'preprocessor_config.json').write_text(json.dumps({'min_pixels': 64, 'max_pixels': 400}))
  rng = np.random.default_rng(0)
  for n in range(6):
    Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).save(root / f'{n}.png')
  (root / 'items.jsonl').write_text('\n'.join(map(json.dumps, ITEMS)) + '\n')
  return root / 'model', root / 'items.jsonl'


@pytest.fixture(scope='module')
def found(folder, tmp_path_factory):
  out = tmp_path_factory.mktemp('study') / 'out'
  return vl_layers.measure(*folder, out), out


forward = jax.jit(vl.forward, static_argnums=0)


def right(model, prompt) -> bool:
  logits = np.asarray(forward(*model, vl_layers.arranged(model[0], prompt)))[0, len(prompt.tokens) - 1]
  return bool(np.argmax(logits[prompt.letters]) == prompt.answer)


def test_each_number_is_that_of_the_model_without_the_layer(folder, found):
  config, params, tokenizer = vl_interop.load(folder[0])
  processor = vl_interop.processor(folder[0], config)
  ids = mmmu.Ids(config.start_id, config.image_id, config.end_id)
  asked = mmmu.read(folder[1])
  records = [json.loads(line) for line in (found[1] / 'items.jsonl').read_text().splitlines()]
  assert len(records) == len(asked.items) == 3 and asked.skipped == 1
  without = {tower: [vl.remove_layers(config, params, tower, [l]) for l in getattr(config, tower).layer_ids]
             for tower in vl.TOWERS}
  for item, record in zip(asked.items[:2], records):
    prompt = mmmu.prompt(item, tokenizer, processor, ids)
    assert record['whole'] == right((config, params), prompt)
    for tower, models in without.items():
      assert record[tower] == [int(right(less, prompt)) - record['whole'] for less in models]
  assert any(any(r['text']) for r in records) and any(any(r['vision']) for r in records)
  assert records[2]['vision'] == [0, 0, 0]  # a question without a picture


def test_the_result_is_the_mean_over_questions(found):
  result, out = found
  records = [json.loads(line) for line in (out / 'items.jsonl').read_text().splitlines()]
  written = json.loads((out / 'vl_layers.json').read_text())
  assert written['accuracy']['value'] == pytest.approx(100 * np.mean([r['whole'] for r in records]))
  for tower, L in (('vision', 3), ('text', 2)):
    drop = written[tower]['drop']
    assert written[tower]['layer_ids'] == list(range(1, L + 1))
    np.testing.assert_allclose(drop['value'], 100 * np.mean([r[tower] for r in records], axis=0))
    assert all(low <= value <= high for low, value, high in zip(drop['low'], drop['value'], drop['high']))
    assert '<svg' in (out / f'{tower}.svg').read_text()
  assert (written['items'], written['skipped'], written['chance']) == (3, 1, pytest.approx((1 / 8 + 1 / 8 + 1 / 3) / 3))
  assert {k: v for k, v in result.items() if k != 'out'} == written


def test_a_study_goes_on_behind_its_last_whole_line(folder, found, tmp_path):
  vl_layers.measure(*folder, tmp_path / 'out', limit=2)
  file = tmp_path / 'out' / 'items.jsonl'
  lines = file.read_text().splitlines(keepends=True)
  file.write_text(lines[0] + lines[1][:9])  # killed while it wrote
  again = vl_layers.measure(*folder, tmp_path / 'out')
  assert file.read_text() == (found[1] / 'items.jsonl').read_text()
  assert again['text'] == found[0]['text'] and again['vision'] == found[0]['vision']


def test_another_study_is_not_continued(folder, found, tmp_path):
  with pytest.raises(UserError, match='another processor'):
    vl_layers.measure(*folder, found[1], max_pixels=256)
  with pytest.raises(UserError, match='another dtype'):
    vl_layers.measure(*folder, found[1], dtype='bfloat16')
  (tmp_path / 'notes.txt').write_text('mine')
  with pytest.raises(UserError, match='not empty'):
    vl_layers.measure(*folder, tmp_path)


def test_a_model_without_a_tokenizer_is_refused(tmp_path, folder):
  vl_tiny.write(tmp_path / 'model')
  with pytest.raises(UserError, match='no tokenizer'):
    vl_layers.measure(tmp_path / 'model', folder[1], tmp_path / 'out')


def test_shapes_are_few():
  sizes = [vl_layers._bucket(n, 4) for n in range(1, 2000)]
  assert all(size >= n for n, size in zip(range(1, 2000), sizes)) and all(size % 4 == 0 for size in sizes)
  assert sorted(set(sizes)) == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
