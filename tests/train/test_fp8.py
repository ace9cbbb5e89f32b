"""A run whose blocks compute in 8-bit floats: it learns as a plain one does, and what it leaves is not rounded."""

import dataclasses
import sys

import numpy as np
import pytest
from safetensors import numpy as safetensors

import lns_jax
from lns_jax import runs
from lns_jax.depth.jacobian import jacobian
from lns_jax.interop import generate
from lns_jax.interop.export import export
from lns_jax.models import layout
from lns_jax.train import log, loop
from train.test_loop import settings, text  # noqa: F401

STEPS = 40


pytestmark = pytest.mark.slow  # of a run of its own, emulated on a CPU


@pytest.fixture(scope='module')
def finished(text, tmp_path_factory):  # noqa: F811
  def run(matmul):
    workdir = tmp_path_factory.mktemp(matmul) / 'run'
    return workdir, loop.train(settings(text, model={'matmul': matmul}, train={'steps': STEPS, 'layer_stats_every': 0},
                                        checkpoint={'every': 0}), workdir)
  return {matmul: run(matmul) for matmul in ('plain', 'fp8')}


def test_the_loss_falls_as_that_of_a_plain_run(finished):
  curves = {m: [r['loss'] for r in log.read(workdir / 'metrics.jsonl') if 'loss' in r]
            for m, (workdir, _) in finished.items()}
  fall = {m: c[0] - np.mean(c[-5:]) for m, c in curves.items()}
  assert fall['plain'] > 1
  assert fall['fp8'] == pytest.approx(fall['plain'], rel=0.05)
  assert curves['fp8'] != curves['plain']


def test_evaluation_computes_as_the_run_did(finished):
  workdir, result = finished['fp8']
  assert runs.evaluate(workdir)['loss'] == pytest.approx(result['loss'], rel=1e-5)


def test_the_model_generates(finished):
  config, params, _ = lns_jax.load(finished['fp8'][0])
  assert config.matmul == 'fp8'
  found, = generate.generate(config, params, [[1, 2, 3]], max_new=3)
  assert len(found) == 3


def test_jacobians_are_those_of_plain_products(finished):
  """Rounding has no derivative, and forward differentiation of it is refused."""
  config, params, _ = lns_jax.load(finished['fp8'][0])
  tokens = {'tokens': np.arange(12, dtype=np.int32)[None], 'segment_ids': np.ones((1, 12), np.int32)}
  found, plain = (jacobian(c, params, [tokens], iterations=2, probes=2)
                  for c in (config, dataclasses.replace(config, matmul='plain')))
  np.testing.assert_array_equal(found['spectral'].value, plain['spectral'].value)


def test_exported_weights_are_the_unrounded_ones(finished, tmp_path):
  workdir, _ = finished['fp8']
  export(workdir, tmp_path / 'hf')
  down = layout.unstack(lns_jax.load(workdir)[1])['layers']['2']['mlp']['down']
  found = safetensors.load_file(tmp_path / 'hf' / 'model.safetensors')['model.layers.1.mlp.down_proj.weight']
  np.testing.assert_array_equal(found.T, down)


def test_a_machine_without_8_bit_floats_reads_it_with_plain_products(finished, monkeypatch):
  monkeypatch.setitem(sys.modules, 'qwix', None)
  config, _, _ = lns_jax.load(finished['fp8'][0])
  assert config.matmul == 'plain'
