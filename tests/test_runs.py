"""Finished runs evaluated by other devices than those that trained them."""

import dataclasses

import jax
import pytest

from lns_jax import runs, sharding
from lns_jax.config import MeshConfig, changed
from lns_jax.interop.load import load, load_shared
from lns_jax.train import loop
from train.test_loop import settings, text  # noqa: F401: a fixture


@pytest.fixture(scope='module')
def scanned(text, tmp_path_factory):  # noqa: F811
  """A run of two updates, its parameters shared by four devices, saved by a scanned loop."""
  folder = tmp_path_factory.mktemp('scanned')
  config = changed(settings(text, train={'layer_stats_every': 0, 'steps': 2}, optimizer={'warmup_steps': 0}),
                   {'mesh': {'data': 2, 'fsdp': 4}, 'model': {'loop': 'scan'}})
  return folder, config, loop.train(config, folder)


def test_parameters_are_read_in_parts_and_the_loss_is_that_of_the_run(scanned):
  folder, config, result = scanned
  mesh = sharding.fitting(config)
  assert mesh.shape['fsdp'] == 4
  model, params = load_shared(folder, mesh)
  for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(load(folder)[1]), strict=True):
    assert (x == y).all()
  assert [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(params['embed'])] == [
      (config.model.vocab_size, config.model.d_model // 4)]
  _, half, _ = load(folder, dtype='bfloat16', sharding=sharding.share)
  assert jax.tree.map(lambda x: x.sharding, half) == sharding.share(model)
  assert all((x == y.astype(x.dtype)).all() for x, y in zip(jax.tree.leaves(half), jax.tree.leaves(params)))
  found = runs.evaluate(folder)
  assert found['loss'] == pytest.approx(result['loss'], rel=1e-6) and found['tokens'] == result['tokens']


def test_devices_that_do_not_fit_the_mesh_of_the_run_share_its_parameters(scanned, monkeypatch):
  folder, config, result = scanned
  shared = sharding.fitting(dataclasses.replace(config, mesh=MeshConfig(data=64, fsdp=4)))
  assert shared.shape['fsdp'] == 8
  monkeypatch.setattr(sharding, 'fitting', lambda config: shared)
  assert runs.evaluate(folder)['loss'] == pytest.approx(result['loss'], rel=1e-6)
