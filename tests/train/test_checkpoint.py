"""A checkpoint gives back what was saved, bit for bit, or says in one sentence why it cannot."""

import os
import re
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lns_jax.config import CheckpointConfig
from lns_jax.errors import UserError
from lns_jax.train import checkpoint, manifest, stored

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def state(seed=0, width=8):
  """Parameters of several types and shapes, and an optimizer state whose moments and count are not zero."""
  keys = jax.random.split(jax.random.key(seed), 4)
  params = {
      'embed': jax.random.normal(keys[0], (16, width), jnp.bfloat16),
      'layers': {i: {'attn': {'q': jax.random.normal(k, (width, width))}, 'norm': jnp.ones(width) + seed}
                 for i, k in (('2', keys[1]), ('10', keys[2]))},
  }
  grads = jax.tree.map(lambda x: (x * 0.1).astype(x.dtype), params)
  return params, OPTIMIZER.update(grads, OPTIMIZER.init(params))[1]


def save(keeper, step, seed=None, **other):
  params, opt_state = state(step if seed is None else seed)
  keeper.save(step, params=params, opt_state=opt_state, data={'row': step}, config={'model': {'scheme': 'lns'}} | other)


def folder_with(path, *steps, **settings):
  with checkpoint.Checkpointer(path, CheckpointConfig(**settings)) as keeper:
    for step in steps:
      save(keeper, step)
  return path


def restore(path, step=None, like=None, **settings):
  with checkpoint.Checkpointer(path, CheckpointConfig(**settings)) as keeper:
    return keeper.restore(*(like or state()), step=step)


def assert_same(found, wanted):
  """Same tree types, same dtypes, same bits."""
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def largest_file(folder):
  return max((p for p in folder.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)


# Saving and restoring.


def test_everything_comes_back_bit_for_bit(tmp_path):
  restored = restore(folder_with(tmp_path, 5))
  assert restored.step == 5 and restored.data == {'row': 5} and restored.config == {'model': {'scheme': 'lns'}}
  assert_same((restored.params, restored.opt_state), state(5))
  assert isinstance(restored.opt_state[1][0], optax.ScaleByAdamState) and int(restored.opt_state[1][0].count) == 1


def test_an_empty_folder_restores_nothing(tmp_path):
  assert restore(tmp_path / 'new' / 'run') is None


def test_leaving_the_context_finishes_the_last_save(tmp_path):
  with pytest.raises(KeyError, match='user code'):
    with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
      save(keeper, 3)
      raise KeyError('user code')
  assert restore(tmp_path).step == 3
  assert sorted(p.name for p in tmp_path.iterdir()) == ['3']


def test_arrays_may_be_donated_or_changed_as_soon_as_save_returns(tmp_path):
  negate = jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig(keep=9)) as keeper:
    for step in range(1, 5):
      params = {'device': jnp.full((500, 2000), float(step)), 'host': np.full((500, 2000), float(step), np.float32)}
      keeper.save(step, params=params, opt_state={'count': jnp.int32(step)}, data={}, config={})
      params['host'][:] = -1
      jax.block_until_ready(negate(params['device']))
    keeper.wait()
    for step in range(1, 5):
      saved = stored.load_params(tmp_path, step=step)
      assert (saved['device'] == step).all() and (saved['host'] == step).all()


def test_save_returns_before_the_step_is_on_disk_and_steps_lists_it_after(tmp_path):
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
    assert keeper.steps() == [] and keeper.latest() is None
    save(keeper, 1)
    keeper.wait()
    assert keeper.steps() == [1] and keeper.latest() == 1
    keeper.check()


@pytest.mark.parametrize('keep, keep_every, kept', [
    (2, 10, [10, 15, 20]), (1, 0, [20]), (3, 0, [10, 15, 20]), (9, 0, [1, 5, 10, 15, 20]), (1, 5, [5, 10, 15, 20])])
def test_the_newest_and_every_kth_are_kept(tmp_path, keep, keep_every, kept):
  folder_with(tmp_path, 1, 5, 10, 15, 20, keep=keep, keep_every=keep_every)
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted(map(str, kept))


@pytest.mark.parametrize('step', [4, 5])
def test_a_step_is_never_saved_over_itself_or_a_later_one(tmp_path, step):
  folder_with(tmp_path, 5)
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
    with pytest.raises(UserError, match=rf'/5 is there already, so that step {step} is not saved'):
      save(keeper, step, seed=9)
  assert_same(restore(tmp_path).params, state(5)[0])


@pytest.mark.parametrize('data', [{'rows': (1, 2)}, {1: 'a'}, {'x': float('nan')}])
def test_values_that_json_would_change_are_refused(tmp_path, data):
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
    with pytest.raises(ValueError):
      keeper.save(1, params=state()[0], opt_state=state()[1], data=data, config={})


def test_a_step_can_be_asked_for(tmp_path):
  folder_with(tmp_path, 1, 2, 3, keep=3)
  assert restore(tmp_path, step=2).step == 2
  with pytest.raises(UserError, match='holds no checkpoint of step 4, only of: 1, 2, 3'):
    restore(tmp_path, step=4)


# What does not fit is refused by name.


def change(tree, edit):
  tree = jax.tree.map(lambda x: x, tree)
  edit(tree)
  return tree


@pytest.mark.parametrize('edit, words', [
    (lambda p: p['layers']['2']['attn'].update(q=jnp.ones((8, 4))),
     r'has \(8, 8\) float32 at params/layers/2/attn/q where \(8, 4\) float32 was asked for'),
    (lambda p: p.update(embed=p['embed'].astype(jnp.float32)),
     r'has \(16, 8\) bfloat16 at params/embed where \(16, 8\) float32 was asked for'),
    (lambda p: p.update(head=jnp.ones(3)), r'has nothing at params/head where \(3,\) float32 was asked for'),
    (lambda p: p['layers'].pop('10'),
     r'has \(8, 8\) float32 at params/layers/10/attn/q where nothing was asked for'),
])
def test_another_shape_type_or_name_is_refused_by_path(tmp_path, edit, words):
  params, opt_state = state()
  folder_with(tmp_path, 1)
  with pytest.raises(UserError, match=words):
    restore(tmp_path, like=(change(params, edit), opt_state))
  with pytest.raises(UserError, match=words):
    stored.load_params(tmp_path, like=change(params, edit))
  assert restore(tmp_path).step == 1


def test_another_optimizer_is_refused_by_path(tmp_path):
  params, _ = state()
  folder_with(tmp_path, 1)
  with pytest.raises(UserError, match=r'at opt_state/1/0/count where nothing was asked for'):
    restore(tmp_path, like=(params, optax.sgd(0.1).init(params)))


# Damage.


def overwrite(folder):
  with open(largest_file(folder / 'params'), 'r+b') as f:
    f.seek(200)
    two = f.read(2)
    f.seek(200)
    f.write(bytes(b ^ 0xff for b in two))


def empty(folder):
  for path in sorted(folder.rglob('*'), reverse=True):
    path.rmdir() if path.is_dir() else path.unlink()


HARMS = {
    'two bytes overwritten': (overwrite, r'params/\S+ does not match its checksum'),
    'cut': (lambda f: os.truncate(largest_file(f / 'opt_state'), 60), r'opt_state/\S+ has 60 bytes where \d+ were'),
    'emptied': (empty, 'manifest.json is missing'),
    'manifest removed': (lambda f: (f / manifest.NAME).unlink(), 'manifest.json is missing'),
    'manifest cut': (lambda f: os.truncate(f / manifest.NAME, 20), 'manifest.json is damaged'),
    'config removed': (lambda f: (f / 'config' / 'metadata').unlink(), 'config/metadata is missing'),
}


@pytest.mark.parametrize('harm', HARMS)
def test_a_damaged_step_is_set_aside_for_the_one_before(tmp_path, caplog, harm):
  damage, words = HARMS[harm]
  folder_with(tmp_path, 1, 2)
  damage(tmp_path / '2')
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
    restored = keeper.restore(*state())
    assert restored.step == 1
    assert_same((restored.params, restored.opt_state), state(1))
    assert caplog.text.count('is damaged: ') == 1
    assert re.search(rf'/2 is damaged: {words}', caplog.text)
    assert (tmp_path / '2.damaged').is_dir() and not (tmp_path / '2').exists()
    save(keeper, 2)  # the step can be saved again
  assert_same(restore(tmp_path).params, state(2)[0])


def test_two_damaged_steps_and_a_name_that_is_taken(tmp_path):
  folder_with(tmp_path, 1, 2, 3, keep=3)
  (tmp_path / '3.damaged').mkdir()
  overwrite(tmp_path / '2')
  empty(tmp_path / '3')
  assert restore(tmp_path).step == 1
  assert sorted(p.name for p in tmp_path.iterdir()) == ['1', '2.damaged', '3.damaged', '3.damaged-1']


@pytest.mark.parametrize('harm', HARMS)
def test_a_run_stops_each_time_when_no_step_is_sound(tmp_path, harm):
  folder_with(tmp_path, 1)
  HARMS[harm][0](tmp_path / '1')
  for _ in range(2):
    with pytest.raises(UserError, match=r'no checkpoint in \S+ is sound \(1: .*\)'):
      restore(tmp_path)
  with pytest.raises(UserError, match='is sound'):
    restore(tmp_path, step=1)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['1']  # nothing is moved or lost


def test_without_checksums_no_content_is_read(tmp_path):
  folder_with(tmp_path, 1, 2)
  (tmp_path / '2' / 'commit_success.txt').write_bytes(bytes((tmp_path / '2' / 'commit_success.txt').stat().st_size))
  assert restore(tmp_path, checksums=False).step == 2
  assert restore(tmp_path).step == 1


def test_without_checksums_sizes_are_still_checked(tmp_path):
  folder_with(tmp_path, 1, 2, checksums=False)
  os.truncate(largest_file(tmp_path / '2' / 'params'), 60)
  assert restore(tmp_path, checksums=False).step == 1


@pytest.mark.parametrize('file', ['config/metadata', 'params/_METADATA', 'opt_state/manifest.ocdbt'])
def test_what_only_checksums_would_notice_is_one_sentence_without_them(tmp_path, file):
  path = folder_with(tmp_path, 1, 2) / '2' / file
  path.write_bytes(bytes(path.stat().st_size))
  with pytest.raises(UserError, match=r'^checkpoint \S+/2 cannot be read: [^\n]+ the step before it would be used\.$'):
    restore(tmp_path, checksums=False)
  (tmp_path / '2').rename(tmp_path / 'away')
  assert restore(tmp_path, checksums=False).step == 1


# Interrupted saves and deletions, as a kill leaves them.


@pytest.mark.parametrize('earlier', [(), (1,)])
def test_a_step_killed_between_commit_and_manifest_is_removed(tmp_path, caplog, earlier):
  folder_with(tmp_path, *earlier, 2)
  (tmp_path / '2' / manifest.NAME).unlink()
  (tmp_path / '2.unfinished').touch()
  (tmp_path / '2.orbax-checkpoint-tmp').mkdir()
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
    restored = keeper.restore(*state())
    assert (restored.step if restored else None) == (earlier[0] if earlier else None)
    assert 'was interrupted and is removed' in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(map(str, earlier))
    save(keeper, 2)
  assert restore(tmp_path).step == 2


def test_a_step_killed_after_its_manifest_is_whole(tmp_path):
  folder_with(tmp_path, 1, 2)
  (tmp_path / '2.unfinished').touch()
  assert stored.load_config(tmp_path)[0] == 2
  assert restore(tmp_path).step == 2
  assert not (tmp_path / '2.unfinished').exists()


def test_a_deletion_that_was_killed_is_completed(tmp_path):
  folder_with(tmp_path, 1, 2)
  (tmp_path / '1.unfinished').touch()
  (tmp_path / '1' / manifest.NAME).unlink()
  largest_file(tmp_path / '1').unlink()
  assert restore(tmp_path).step == 2
  assert sorted(p.name for p in tmp_path.iterdir()) == ['2']


def test_a_deletion_that_fails_is_one_sentence_and_costs_no_newer_step(tmp_path):
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig(keep=1)) as keeper:
    save(keeper, 1)
    keeper.wait()
    (tmp_path / '1.unfinished' / 'full').mkdir(parents=True)  # in the marker's place, cannot be unlinked
    save(keeper, 2)
    with pytest.raises(UserError, match=r'^old checkpoint \S+/1 could not be deleted: [^;]+; newer ones are intact\.$'):
      keeper.wait()
  with pytest.raises(UserError, match=r'^what an interrupted save or deletion left of \S+/1 could not be removed: '):
    restore(tmp_path)
  (tmp_path / '1.unfinished' / 'full').rmdir()
  assert restore(tmp_path).step == 2


# Readers.


def test_readers_find_the_newest_sound_step_and_change_nothing(tmp_path, caplog):
  folder_with(tmp_path, 1, 2, 3, keep=3)
  overwrite(tmp_path / '3')
  (tmp_path / '4').mkdir()
  (tmp_path / '4.unfinished').touch()  # a run is saving it just now
  before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob('*'))
  assert_same(stored.load_params(tmp_path), jax.tree.map(np.asarray, state(2)[0]))
  assert stored.load_config(tmp_path) == (3, {'model': {'scheme': 'lns'}})  # its config is sound
  assert stored.load_config(tmp_path, step=1)[0] == 1
  assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob('*')) == before
  assert f'{tmp_path}/3 is damaged' in caplog.text and f'{tmp_path}/4' not in caplog.text


def test_parameters_load_as_numpy_or_to_where_they_are_asked(tmp_path):
  folder_with(tmp_path, 1)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(stored.load_params(tmp_path)))
  loaded = stored.load_params(tmp_path, like=state()[0])
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(loaded))
  assert_same(loaded, state(1)[0])


def test_only_parameters_are_read(tmp_path):
  folder_with(tmp_path, 1)
  for path in (tmp_path / '1' / 'opt_state').rglob('*'):
    if path.is_file():
      path.write_bytes(bytes(path.stat().st_size))
  assert_same(stored.load_params(tmp_path), jax.tree.map(np.asarray, state(1)[0]))


@pytest.mark.parametrize('path', ['.', 'absent'])
def test_readers_say_when_there_is_no_checkpoint(tmp_path, path):
  assert stored.load_config(tmp_path / path) is None
  with pytest.raises(UserError, match='holds no checkpoint'):
    stored.load_params(tmp_path / path)
  assert not (tmp_path / 'absent').exists()


# Folders that cannot be written, relative ones, full disks.


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=r'checkpoint folder \S+/file/run cannot be written: Not a directory\.'):
    checkpoint.Checkpointer(tmp_path / 'file' / 'run', CheckpointConfig())


def test_a_relative_folder_works(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder_with('run', 1)
  assert (tmp_path / 'run' / '1').is_dir() and stored.load_config('run')[0] == 1


@pytest.fixture
def small_files():
  """No file may grow beyond 1 MB, as on a disk that is nearly full."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
  yield
  resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_4_mb(keeper):
  noise = np.random.default_rng(0).standard_normal((1000, 1000), np.float32)
  keeper.save(1, params={'w': jnp.asarray(noise)}, opt_state={'count': jnp.int32(1)}, data={}, config={})


def test_a_failed_save_is_reported_by_the_next_check_and_only_once(tmp_path, small_files):
  with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
    save_4_mb(keeper)
    with pytest.raises(UserError, match='/1 could not be written: File too large'):
      while True:
        keeper.check()
        time.sleep(0.01)
    save(keeper, 1)  # what fits is saved
  assert restore(tmp_path).step == 1


def test_the_error_of_the_run_comes_before_that_of_its_last_save(tmp_path, small_files, caplog):
  with pytest.raises(KeyError, match='user code'):
    with checkpoint.Checkpointer(tmp_path, CheckpointConfig()) as keeper:
      save_4_mb(keeper)
      raise KeyError('user code')
  assert '/1 could not be written: File too large' in caplog.text
