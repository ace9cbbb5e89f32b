"""A model written as a run folder: the same function, its origin named, whole or not at all."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lns_jax
from lns_jax import config as config_lib
from lns_jax.config import CheckpointConfig, RunConfig
from lns_jax.data import tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import save as save_lib
from lns_jax.interop.load import load_run_config
from lns_jax.models import layout
from lns_jax.train import checkpoint, run_info
import tiny
from tiny import batch, model, params

VIT = dict(family='vit', causal=False, vocab_size=32000, image_size=8, patch_size=4, channels=1, num_classes=5)


def run_folder(folder, config, step: int = 7, params=None, tokenizer=None):
  """A run folder as training leaves it, of a model that nobody trained: given parameters, or random gains."""
  folder.mkdir()
  values = config_lib.to_dict(RunConfig(model=config))
  (folder / 'run_info.json').write_text(json.dumps(run_info.collect(values, 'c0ffee')))
  if config.family == 'decoder':
    (tokenizer or tokenizers.byte_tokenizer()).save(folder / 'tokenizer')
  canonical = layout.unstack(tiny.params(config) if params is None else params)
  with checkpoint.Checkpointer(folder / 'checkpoints', CheckpointConfig()) as saver:
    saver.save(step, params=canonical, opt_state={'mu': np.zeros(2)}, data={'step': step}, config=values)
  return folder


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return run_folder(tmp_path_factory.mktemp('save') / 'run', model(scheme='lns', num_layers=4))


def read(config):
  images = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype(np.float32)
  return {'images': images} if config.family == 'vit' else {k: batch()[k] for k in ('tokens', 'segment_ids')}


CASES = {
    'lns': dict(scheme='lns'), 'lns scanned': dict(scheme='lns', loop='scan'),
    'mix scanned': dict(scheme='mix', mix_fraction=0.5, loop='scan'), 'deepnorm': dict(scheme='deepnorm'),
    # Layer 4 is whole after 12 updates and a run's ramp stands at its step.
    'prores': dict(scheme='prores', prores_steps=3), 'learned factors scanned': dict(scheme='lns_learned', loop='scan'),
    'images': dict(scheme='branch_lns', **VIT), 'tied': dict(scheme='pre', tie_embeddings=True)}


@pytest.mark.parametrize('case', CASES)
def test_a_model_without_layers_on_disk_is_the_one_in_memory(case, tmp_path):
  """The second and third layer go; the fourth keeps l = 4 of L = 4, in its factor and in the split of mix."""
  like = run_folder(tmp_path / 'run', model(num_layers=4, **CASES[case]))
  config, whole, _ = lns_jax.load(like)
  config, less = lns_jax.remove_layers(config, whole, [2, 3])
  found_config, found, tokenizer = lns_jax.load(save_lib.save(config, less, tmp_path / 'less', like=like))
  assert found_config == config and found_config.layer_ids == (1, 4) and found_config.depth == 4
  assert load_run_config(tmp_path / 'less')[1].model.ramp_step == -1  # the step says it
  assert (tokenizer is None) == (config.family == 'vit')
  jax.tree.map(np.testing.assert_array_equal, found, less)
  logits = jax.jit(lambda p: lns_jax.apply(config, p, read(config))[0])
  np.testing.assert_array_equal(logits(found), logits(less))


def test_the_folder_says_where_it_comes_from(run, tmp_path):
  config, whole, _ = lns_jax.load(run)
  once = save_lib.save(*lns_jax.remove_layers(config, whole, [2]), tmp_path / 'once', like=run)
  twice = save_lib.save(*lns_jax.remove_layers(*lns_jax.load(once)[:2], [4]), tmp_path / 'twice', like=once)
  info = run_info.read(once)
  assert info['origin'] == {'path': str(run), 'step': 7, 'removed_layers': [2]}
  assert info['corpus_hash'] == 'c0ffee' and info['versions']['jax'] and info['command']
  assert run_info.read(twice)['origin'] == {'path': str(once), 'step': 7, 'removed_layers': [4]}
  step, resolved = load_run_config(twice)
  assert step == 7 and resolved.model.layer_ids == (1, 3) and resolved.model.depth == 4
  assert dataclasses.replace(resolved, model=config) == dataclasses.replace(load_run_config(run)[1], model=config)
  assert config_lib.to_dict(resolved) == run_info.read(twice)['config']


def test_a_home_is_expanded_in_every_path(run, tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(run.parent))
  config, whole, tokenizer = lns_jax.load('~/run')
  assert tokenizer.vocab_size == lns_jax.load(run)[2].vocab_size
  save_lib.save(config, whole, '~/copy', like='~/run')
  assert run_info.read('~/copy')['origin']['path'] == str(run)


def test_types_of_the_parameters_stay(run, tmp_path):
  config, whole, _ = lns_jax.load(run, dtype=jnp.bfloat16)
  save_lib.save(config, whole, tmp_path / 'half', like=run)
  assert {x.dtype for x in jax.tree.leaves(lns_jax.load(tmp_path / 'half')[1])} == {jnp.dtype(jnp.bfloat16)}


class Stop(BaseException):
  """What a signal raises."""


@pytest.mark.parametrize('error, seen', [(Stop(), Stop), (OSError(28, 'No space left on device'), UserError)])
@pytest.mark.parametrize('at', ['shutil.copytree', 'lns_jax.train.manifest.write', 'os.rename'])
def test_an_interrupted_write_leaves_nothing(error, seen, at, run, tmp_path, monkeypatch):
  def fail(*args, **kwargs):
    raise error
  config, whole, _ = lns_jax.load(run)
  monkeypatch.setattr(at, fail)
  said = 'less could not be written: No space left on device; nothing is left of it' if seen is UserError else None
  with pytest.raises(seen, match=said):
    save_lib.save(config, whole, tmp_path / 'less', like=run)
  assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_a_place_that_cannot_be_is_refused(run, tmp_path):
  config, whole, _ = lns_jax.load(run)
  (tmp_path / 'file').write_text('mine')
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'dangling').symlink_to(tmp_path / 'nowhere')
  for name, words in (('file', 'exists'), ('empty', 'exists'), ('dangling', 'exists'),
                      ('file/below', 'file is not a folder'), ('s3://bucket/less', 'not on a local disk'),
                      ('x' * 250, '255 at most'), ('x\0', 'NUL')):
    with pytest.raises(UserError, match=words):
      save_lib.save(config, whole, name if '://' in name else tmp_path / name, like=run)
  assert (tmp_path / 'file').read_text() == 'mine' and len(list(tmp_path.iterdir())) == 3


def test_parameters_of_another_model_are_named(run, tmp_path):
  config, whole, _ = lns_jax.load(run)
  less, _ = lns_jax.remove_layers(config, whole, [2])
  with pytest.raises(UserError, match=r'have \(.*\) at layers/2/.* where the model has nothing'):
    save_lib.save(less, whole, tmp_path / 'less', like=run)
  assert list(tmp_path.iterdir()) == []


def test_like_must_be_a_run_folder(run, tmp_path):
  config, whole, _ = lns_jax.load(run)
  with pytest.raises(UserError, match='not a run folder'):
    save_lib.save(config, whole, tmp_path / 'less', like=tmp_path)
