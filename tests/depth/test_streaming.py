"""Memory of a measure does not grow with the sample: at each batch, what is alive on devices and on the host."""

import gc
import tracemalloc

import jax
import pytest

import tiny
from lns_jax.depth.measures import LOSS
from lns_jax.models import layout

CONFIG = tiny.model(num_layers=2, d_model=16, d_ff=32, loop='scan')
BOUNDED = ('projection', 'tsne')  # they keep the tokens that they draw, a fixed number
FAST = ('profile', 'layer_drop', 'linear')  # the others are made of the same parts, and slow to compile
NOISE = 10_000  # bytes that Python gains and loses between readings: less than the token ids of five batches


class Batches:
  """Eight batches; of each reading, what is alive whenever one is asked for."""

  def __init__(self):
    self.readings = []

  def __len__(self):
    return 8

  def __iter__(self):
    alive = []
    self.readings.append(alive)
    for seed in range(8):
      gc.collect()
      alive.append(sum(a.nbytes for a in jax.live_arrays()) + tracemalloc.get_traced_memory()[0])
      yield tiny.batch(rows=8, T=64, seed=seed)


@pytest.mark.parametrize('name', [pytest.param(n, marks=() if n in FAST else pytest.mark.slow)
                                  for n in LOSS if n not in BOUNDED])
def test_nothing_is_kept_of_a_batch(name):
  params, measure = layout.stack(tiny.params(CONFIG), CONFIG), LOSS[name]
  gc.freeze()  # what other tests left, which a collection would go through again and again
  measure.run(CONFIG, params, Batches(), seed=0)  # compiles
  batches = Batches()
  tracemalloc.start()
  measure.run(CONFIG, params, batches, seed=0)
  tracemalloc.stop()
  gc.unfreeze()
  whole = [alive for alive in batches.readings if len(alive) == 8]
  assert whole
  for _, _, settled, *later in whole:  # some measures use every other batch
    assert max(later) - settled < NOISE
