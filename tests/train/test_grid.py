"""Five steps are the same on every mesh and under every remat policy, and go on from each other's checkpoints.

The whole grid is slow: `pytest -n 0 -m slow tests/train/test_grid.py`.
"""

import functools
import pathlib
import typing

import jax
import numpy as np
import pytest

from lns_jax import config as config_lib
from lns_jax import sharding
from lns_jax.models import layout
from lns_jax.train import checkpoint, evaluate, resume
from lns_jax.train import step as step_lib
from lns_jax.train.run import Run
from tiny import batch, leaves_close, model, params

STEPS, STOP = 5, 2  # the step of the checkpoint
V, T, ROWS = 32, 8, 8

AXES = {'dp': 'data', 'fsdp': 'fsdp', 'tp': 'tensor', 'pp': 'stage', 'sequence': 'sequence'}
MESHES = {
    'one': {},
    **{f'{name} {n}': {axis: n} for n in (2, 4, 8) for name, axis in AXES.items()},
    **{f'fsdp+tp {2 * n}': {'fsdp': 2, 'tensor': n} for n in (2, 4)},
    'pp+tp+dp 8': {'stage': 2, 'tensor': 2, 'data': 2},
}
REMATS, SCHEMES, PRECISIONS = ('none', 'names', 'full'), ('lns', 'lns_learned'), ('float32', 'float64')
FAST = ('pp+tp+dp 8', 'names', 'lns_learned', 'float64')
GRID = [pytest.param(*case, marks=() if case == FAST else pytest.mark.slow)
        for mesh in MESHES for remat in REMATS for scheme in SCHEMES for precision in PRECISIONS
        for case in [(mesh, remat, scheme, precision)]]


class Rows(typing.NamedTuple):
  """What a checkpoint says of the rows."""

  hash: str = 'five batches'


class Found(typing.NamedTuple):
  metrics: list[dict]  # of each step
  params: dict  # canonical, after the last


def run_of(mesh: str, remat: str, scheme: str, precision: str, workdir=pathlib.Path(), loop: str = 'scan') -> Run:
  sizes = {'data': 1} | MESHES[mesh]
  settings = config_lib.RunConfig(
      model=model(d_model=16, d_ff=32, num_layers=8, num_heads=8, num_kv_heads=8, vocab_size=V, loop=loop, remat=remat,
                  scheme=scheme, precision=precision),
      data=config_lib.DataConfig(seq_len=T), mesh=config_lib.MeshConfig(**sizes),
      # eps = 1 makes Adam nearly linear: its usual first step is the sign of the gradient, rounding included.
      optimizer=config_lib.OptimizerConfig(lr=0.3, eps=1.0, clip_norm=0.5, schedule='constant'),
      train=config_lib.TrainConfig(steps=STEPS, batch_size=ROWS, layer_stats_every=1))
  devices = sharding.make_mesh(settings.mesh, jax.devices()[:int(np.prod(list(sizes.values())))])
  return Run(settings, devices, STEPS, step_lib.state_shardings(devices, settings, STEPS), workdir, Rows())


def steps(run: Run, compiled, state, first: int, last: int):
  """(the state after step `last`, metrics of steps first..last); batch and start are functions of the step alone."""
  metrics = []
  for i in range(first, last + 1):
    state, found = compiled(state, evaluate.place(run.mesh, batch(ROWS, T, V, seed=i)))
    metrics.append(jax.device_get(found))
  return state, metrics


def save(run: Run, state):
  """As `train.loop.Trainer.save`."""
  params, opt_state = run.to_canonical((state.params, state.opt_state))
  with checkpoint.Checkpointer(run.workdir / 'checkpoints', run.config.checkpoint) as saver:
    saver.save(STOP, params=params, opt_state=opt_state, config=config_lib.to_dict(run.config),
               data={'step': STOP, 'tokens': 0, 'corpus_hash': run.dataset.hash})


def go_on(run: Run, compiled, workdir: pathlib.Path) -> Found:
  """From the checkpoint of step STOP to the end."""
  with checkpoint.Checkpointer(workdir / 'checkpoints', run.config.checkpoint) as saver:
    state, position = resume.restore_or_init(run, saver)
  assert position['step'] == STOP
  state, metrics = steps(run, compiled, state, STOP + 1, STEPS)
  return Found(metrics, layout.unstack(jax.device_get(state.params)))


def whole(run: Run, compiled) -> Found:
  """From the start, with a checkpoint on the way in the run's folder."""
  fresh = step_lib.state_of(run.config, STEPS, params(run.config.model))
  state, metrics = steps(run, compiled, jax.device_put(fresh, run.shardings), 1, STOP)
  save(run, state)
  state, more = steps(run, compiled, state, STOP + 1, STEPS)
  return Found(metrics + more, layout.unstack(jax.device_get(state.params)))


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """(scheme, precision) -> the run on one device, unrolled, without remat: (its `Run`, program, `Found`)."""
  @functools.cache
  def of(scheme, precision):
    run = run_of('one', 'none', scheme, precision, tmp_path_factory.mktemp('one'), loop='unrolled')
    compiled = run.compile_train_step()
    return run, compiled, whole(run, compiled)
  return of


def same(found: Found, expected: Found, precision: str):
  loss, norm, leaf = (1e-5, 1e-6, 1e-5) if precision == 'float32' else (1e-12, 1e-12, 1e-11)
  for ours, right in zip(found.metrics, expected.metrics[-len(found.metrics):], strict=True):
    assert ours['tokens'] == right['tokens']
    np.testing.assert_allclose(ours['loss'], right['loss'], rtol=loss)
    np.testing.assert_allclose(ours['grad_norm'], right['grad_norm'], rtol=norm)
    for name in ('variance', 'attn_ratio', 'mlp_ratio', 'layer_grad_norm'):
      np.testing.assert_allclose(ours[name], right[name], rtol=leaf)
  leaves_close(found.params, expected.params, leaf)  # alpha among them


@pytest.mark.parametrize('mesh, remat, scheme, precision', GRID)
def test_a_mesh_is_one_device(mesh, remat, scheme, precision, reference, tmp_path):
  """Losses, gradients, updates; and a checkpoint crosses to one device and from there."""
  with jax.enable_x64(precision == 'float64'):
    one, of_one, expected = reference(scheme, precision)
    run = run_of(mesh, remat, scheme, precision, tmp_path)
    compiled = run.compile_train_step()
    same(whole(run, compiled), expected, precision)
    same(go_on(one, of_one, run.workdir), expected, precision)
    same(go_on(run, compiled, one.workdir), expected, precision)
