"""Shipped configs: they load, they are the paper's, and they say so."""

import math

import jax
import pytest

from lns_jax import presets
from lns_jax.models import transformer

# name: (parameters in millions (paper.md 3.1), peak rate, steps, warm-up)
PAPER = {
    '9m': (9.0, None, None, None), '20m': (19.5, None, None, None), '35m': (35.2, None, None, None),
    '60m': (58.1, None, None, None), '71m': (70.6, None, None, None),
    '130m': (134.1, 1e-3, 20_000, 2_000), '250m': (247.4, 1e-3, 40_000, 4_000), '350m': (368.0, 1e-3, 60_000, 6_000),
    '1b': (1339.1, 5e-4, 100_000, 1_000), '3b': (2685.8, None, None, None), '7b': (6738.4, None, None, None)}


@pytest.mark.parametrize('name', presets.config_names())
def test_every_config_loads_and_names_its_command(name):
  presets.load_config(name)
  text = presets.config_names()[name].read_text()
  assert f'--config={name}' in text.split('"""')[1]


@pytest.mark.parametrize('size', PAPER)
def test_paper_presets_are_the_papers(size):
  config = presets.load_config(f'llama_{size}')
  shapes = jax.eval_shape(lambda: transformer.init(config.model, jax.random.key(0)))
  millions, rate, steps, warmup = PAPER[size]
  assert round(sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) / 1e6, 1) == millions
  m, o, t = config.model, config.optimizer, config.train
  assert (m.vocab_size, m.norm_eps, m.init, m.tie_embeddings) == (32000, 1e-6, 'paper', False)
  assert (o.name, o.b1, o.b2, o.eps, o.weight_decay, o.clip_norm) == ('adam', 0.9, 0.999, 1e-8, 0, 0)
  assert (t.batch_size, t.seed, config.data.seq_len, config.data.seed) == (512, 1, 256, 32)
  assert (config.data.packing, config.eval.max_tokens) == ('paper', 10_000_000)
  if rate:
    assert (o.lr, t.steps, o.warmup_steps) == (rate, steps, warmup)


def test_an_argument_goes_to_the_config():
  assert presets.load_config('quickstart:tiny').train.steps < presets.load_config('quickstart').train.steps
