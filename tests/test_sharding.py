"""Meshes and where parameters lie."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lns_jax import config as config_lib
from lns_jax import mesh as mesh_lib
from lns_jax import sharding, shards
from lns_jax.config import MeshConfig, RunConfig
from lns_jax.errors import UserError
from lns_jax.models import transformer
from lns_jax.train import checkpoint
from lns_jax.train import step as step_lib
from lns_jax.train.run import Program
from tiny import model


def config(*, train=None, data=None, **changes) -> RunConfig:
  return RunConfig(model=model(**changes), train=config_lib.TrainConfig(steps=1, batch_size=8, **(train or {})),
                   data=config_lib.DataConfig(**(data or {})))


def run(mesh, **changes) -> Program:
  c = config(**changes)
  return Program(c, mesh=mesh, steps=1, shardings=step_lib.state_shardings(mesh, c, 1))


def test_minus_one_takes_what_is_left():
  assert dict(sharding.make_mesh(MeshConfig(data=-1, fsdp=2, tensor=2)).shape) == {
      'data': 2, 'stage': 1, 'fsdp': 2, 'sequence': 1, 'tensor': 2}


@pytest.mark.parametrize('sizes, words', [
    ({'data': 3}, 'mesh.data = 3 takes 3 devices, and there are 8; mesh.data = 8 would.'),
    ({'data': 1}, 'mesh.data = 1 takes 1 devices, and there are 8; mesh.data = 8 would.'),
    ({'fsdp': 3}, 'mesh.fsdp = 3 does not divide the 8 devices; mesh.fsdp = 2 or 4 would.'),
    ({'data': 3, 'fsdp': 2}, 'mesh.data = 3 x mesh.fsdp = 2 takes 6 devices, and there are 8; mesh.data = 4 would.'),
    ({'stage': 2, 'tensor': 8}, 'mesh.stage = 2 x mesh.tensor = 8 does not divide the 8 devices; mesh.stage = 1 or '
                                'mesh.tensor = 4 would.'),
    ({'fsdp': 3, 'tensor': 5}, 'mesh.fsdp = 3 x mesh.tensor = 5 does not divide the 8 devices; mesh.data = -1 with all '
                               'others 1 would.'),
])
def test_sizes_that_do_not_make_the_devices_are_refused_with_one_that_does(sizes, words):
  with pytest.raises(UserError) as e:
    sharding.make_mesh(MeshConfig(**sizes))
  assert str(e.value) == words


@pytest.mark.parametrize('across, sizes', [
    ('data', {'data': 4, 'tensor': 2}), ('fsdp', {'data': 1, 'fsdp': 4, 'tensor': 2}),
    ('fsdp', {'data': 2, 'fsdp': 4}), ('stage', {'data': 2, 'stage': 2, 'sequence': 2})])
def test_only_the_outer_part_of_one_axis_goes_over_slices(across, sizes):
  """Two slices, devices 0-3 and 4-7: the index along the axis, by half its size, is the slice of the device."""
  mesh = sharding.make_mesh(MeshConfig(slices=2, across=across, **sizes))
  assert sorted(d.id for d in mesh.devices.flat) == list(range(8))
  axis = config_lib.AXES.index(across)
  for index, device in np.ndenumerate(mesh.devices):
    assert device.id // 4 == index[axis] // (mesh.devices.shape[axis] // 2)


class Device:
  """A device of a slice; only what `make_mesh` asks of one."""
  platform, device_kind, process_index = 'cpu', 'cpu', 0

  def __init__(self, number, of):
    self.id, self.slice_index = number, of


def test_slices_that_are_not_there_are_refused_with_what_is():
  with pytest.raises(UserError, match='mesh.slices = 3 does not divide the 8 devices; mesh.slices = 2 or 4 would'):
    sharding.make_mesh(MeshConfig(slices=3))
  with pytest.raises(UserError, match=r'mesh.data = 1 does not divide over the 2 slices; mesh.across = fsdp would'):
    sharding.make_mesh(MeshConfig(slices=2, data=1, fsdp=8))
  with pytest.raises(UserError, match='one of data, fsdp and stage must be a multiple of 2'):
    sharding.make_mesh(MeshConfig(slices=2, data=1, tensor=8))
  two = [Device(n, n % 2) for n in range(8)]
  for asked in (1, 4):
    with pytest.raises(UserError, match=rf'mesh.slices = {asked}, but the 8 devices come in 2; .*mesh.slices=2'):
      sharding.make_mesh(MeshConfig(slices=asked), two)
  with pytest.raises(UserError, match='the 2 slices have 4, 3 devices'):
    sharding.make_mesh(MeshConfig(), two[:7])


@pytest.mark.parametrize('loop, lead, name', [('unrolled', (), '1'), ('scan', ('stage',), '1-2')])
def test_rules(loop, lead, name):
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
  where = sharding.params(mesh, model(loop=loop))
  assert where['embed']['table'].spec == P('tensor', 'fsdp')
  layer = where['layers'][name]
  assert layer['attn']['q'].spec == P(*lead, 'fsdp', 'tensor', None)
  assert layer['mlp']['down'].spec == P(*lead, 'tensor', 'fsdp')
  assert layer['attn_in_norm']['gain'].spec == P(*lead, None)


def test_rules_of_biases_and_query_norms():
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
  layer = sharding.params(mesh, model(bias='all', qk_norm='full'))['layers']['1']
  assert {n: layer['attn'][f'{n}_bias'].spec for n in 'qkvo'} == {
      'q': P('tensor'), 'k': P('tensor'), 'v': P('tensor'), 'o': P(None)}
  assert {n: layer['mlp'][f'{n}_bias'].spec for n in ('gate', 'up', 'down')} == {
      'gate': P('tensor'), 'up': P('tensor'), 'down': P(None)}
  assert layer['attn']['q_norm']['gain'].spec == layer['attn']['k_norm']['gain'].spec == P(None)


def changed_rules(**rules):
  return tuple({**dict(mesh_lib.RULES), **rules}.items())


def test_rules_that_collide_or_name_what_is_not_there_are_refused():
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
  with pytest.raises(UserError, match=r"embed/table has .*'vocab' and 'embed', .* both on the mesh axis 'tensor'"):
    sharding.params(mesh, model(), changed_rules(embed='tensor'))
  with pytest.raises(UserError, match=r"both on the mesh axis 'fsdp'"):
    sharding.params(mesh, model(), changed_rules(mlp=('tensor', 'fsdp')))
  with pytest.raises(UserError, match=r"lays 'mlp' on the mesh axis 'tensr'. Did you mean 'tensor'"):
    sharding.params(mesh, model(), changed_rules(mlp='tensr'))
  with pytest.raises(UserError, match=r"logical axis 'batsh', .*Did you mean 'batch'"):
    mesh_lib.spec(('batsh', 'seq'))


@pytest.mark.parametrize('settings, changes, words', [
    ({'tensor': 8}, {}, r'num_kv_heads = 2 \(layers/1/attn/k\) does not .* 8 devices of mesh.tensor; mesh.tensor = 2 '),
    ({'tensor': 2}, {'num_kv_heads': 1}, r'num_kv_heads = 1 .*; model.num_kv_heads = 2 would, or mesh.tensor = 1 '),
    ({'tensor': 4}, {'num_heads': 2, 'num_kv_heads': 2}, r'num_kv_heads = 2 .*; mesh.tensor = 2 '),
    ({'tensor': 4}, {'vocab_size': 258, 'num_kv_heads': 4}, r'vocab_size = 258 .*vocab_size = 256 or 260 would, .*= 2 '),
    ({'tensor': 4}, {'d_ff': 130, 'num_kv_heads': 4}, r'd_ff = 130 .*; model.d_ff = 128 or 132 would, .*tensor = 2 '),
    ({'fsdp': 8}, {'d_model': 60, 'num_heads': 2}, r'd_model = 60 .* mesh.fsdp; model.d_model = 56 or 64 would, or mesh.fsdp = 4 '),
    ({'stage': 4}, {'loop': 'scan', 'num_layers': 6}, 'stage = 4 does not divide the 6 layers of the model; 2 would'),
    ({'stage': 2}, {'loop': 'scan', 'scheme': 'mix', 'mix_count': 1, 'num_layers': 2}, 'stage = 2 needs layers that are all alike'),
    ({'stage': 2}, {}, 'model.loop = scan'),
    ({'stage': 2}, {'loop': 'scan', 'microbatches': 3},
     'batch_size = 8 is not a multiple of 12 .4 devices of mesh.data and mesh.fsdp x 3 parts in the pipeline.; 12 '),
    ({'sequence': 8}, {'data': {'seq_len': 252}}, '252 tokens do not .*sequence; mesh.sequence = 4 would'),
    ({'data': 8}, {'train': {'accumulation': 2}},
     'batch_size = 8 is not a multiple of 16 .8 devices of mesh.data and mesh.fsdp x 2 micro-batches.; 16 '),
])
def test_what_does_not_divide_is_named_with_what_would(settings, changes, words):
  mesh = sharding.make_mesh(MeshConfig(**settings))
  with pytest.raises(UserError, match=words):
    sharding.check(config(**changes), mesh)


def test_tokens_of_an_image_do_not_divide_by_their_class_token():
  mesh = sharding.make_mesh(MeshConfig(sequence=4))
  vit = config_lib.ModelConfig(family='vit', causal=False, d_model=64, num_heads=4, num_layers=1)
  with pytest.raises(UserError, match=r'rows of 197 tokens \(model.pooling = mean .* CLS token\) do not'):
    sharding.check(RunConfig(model=vit), mesh)
  sharding.check(RunConfig(model=dataclasses.replace(vit, pooling='mean')), mesh)


@pytest.mark.parametrize('loop, stage', [('unrolled', 1), ('scan', 1), ('scan', 4)])
def test_a_state_is_born_in_parts_and_changes_its_layout_in_parts(loop, stage):
  """The compiled programs hold less than a third of the whole on any of 8 devices, working memory included."""
  mesh = sharding.make_mesh(MeshConfig(data=1, stage=stage, fsdp=8 // stage))
  r = run(mesh, loop=loop, num_layers=4, num_heads=8, num_kv_heads=8)
  state = r.abstract_state()
  both = (state.params, state.opt_state)
  whole = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  programs = [(jax.jit(lambda: step_lib.init_state(r.config, 1), out_shardings=r.shardings).lower(), whole(state))]
  if loop == 'scan':
    canonical = r.canonical().abstract_state()
    programs += [(r.to_canonical.lower(both), whole(both)),
                 (r.to_native.lower((canonical.params, canonical.opt_state)), whole(both))]
  for lowered, size in programs:
    memory = lowered.compile().memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < size / 3


def test_a_checkpoint_of_a_pipeline_is_split_over_its_stages():
  mesh = sharding.make_mesh(MeshConfig(data=1, stage=4, fsdp=2))
  where = sharding.params(mesh, model())
  assert where['layers']['1']['mlp']['up'].shard_shape((64, 128)) == (8, 128)


def test_what_a_pipeline_saves_and_restores_lies_on_its_stages(tmp_path):
  """In bytes: of parameters and moments a quarter on each of four devices, but for gains and counts."""
  r = run(sharding.make_mesh(MeshConfig(data=1, stage=4), jax.devices()[:4]), loop='scan', num_layers=4)
  with sharding.use(r.mesh):
    state = jax.jit(lambda: step_lib.init_state(r.config, 1), out_shardings=r.shardings)()
  saved, abstract = r.to_canonical((state.params, state.opt_state)), r.canonical().abstract_state()
  with checkpoint.Checkpointer(tmp_path, r.config.checkpoint) as saver:
    saver.save(1, params=saved[0], opt_state=saved[1], config=config_lib.to_dict(r.config), data={})
    saver.wait()
    restored = saver.restore(abstract.params, abstract.opt_state)
  for tree in (saved, (restored.params, restored.opt_state)):
    leaves, held = jax.tree.leaves(tree), collections.Counter()
    for shard in (s for x in leaves for s in x.addressable_shards):
      held[shard.device] += shard.data.nbytes
    assert len(held) == 4 and max(held.values()) < 1.02 * sum(x.nbytes for x in leaves) / 4


def test_layers_drawn_at_once_are_those_drawn_alone():
  """Starts that depend on depth too: a run of layers 1 and 3 against two models of one of them."""
  small = dict(d_model=16, d_ff=24, vocab_size=32, num_layers=3)
  c = dataclasses.replace(model(scheme='lns_init', init='mitchell', **small), layer_ids=(1, 3), num_layers=2)
  init = lambda config: jax.jit(lambda key: transformer.init(config, key))(jax.random.key(1))
  whole = init(c)['layers']
  for l in c.layer_ids:
    alone = init(dataclasses.replace(c, layer_ids=(l,), num_layers=1))['layers']
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-7)  # compiled, so that rounding differs
    jax.tree.map(close, alone[str(l)], whole[str(l)])
  stds = {l: float(np.std(whole[str(l)]['mlp']['down'])) for l in c.layer_ids}
  assert stds[3] / stds[1] == pytest.approx(3 ** -0.5, rel=0.2)  # of 384 numbers each
  assert float(whole['3']['attn_in_norm']['gain'][0]) == pytest.approx(3 ** -0.5)


def test_the_table_adds_up_and_the_sentence_names_what_is_whole():
  """By hand: tables 2 x 256 x 64, a layer 64 x 16 x (4 + 4 + 2 x 2) + 3 x 64 x 128 over 8, gains whole; in float32."""
  mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
  split, whole = 2 * 256 * 64 + 2 * (64 * 16 * 12 + 3 * 64 * 128), 64 + 2 * 2 * 64
  for loop in ('unrolled', 'scan'):
    state = run(mesh, loop=loop, precision='float32').abstract_state()
    rows = {r.name: r for r in shards.rows(state.params)}
    assert sum(r.held for r in rows.values()) == 4 * (split / 8 + whole)
    assert sum(r.nbytes for r in rows.values()) == 4 * (split + whole)
    assert rows['layers/1-2/attn/q'].place.endswith('fsdp, tensor, -)')
    assert f'layers/1-2/attn_in_norm/gain with {shards.size(4 * 2 * 64)}' in shards.summary(*state[:2])
    assert shards.table(state.params).count('\n') == len(rows) == 12


@pytest.mark.parametrize('settings, want', [
    ({'data': 4, 'fsdp': 2}, {'data': 4, 'fsdp': 2}), ({'data': -1, 'tensor': 2}, {'data': 4, 'tensor': 2}),
    ({'data': 256}, {'fsdp': 4, 'data': 2}), ({'fsdp': 512, 'data': 1}, {'fsdp': 4, 'data': 2}),
    ({'stage': 2, 'data': -1}, {'fsdp': 4, 'data': 2})])
def test_a_finished_run_is_evaluated_on_its_own_mesh_or_with_shared_parameters(settings, want):
  c = dataclasses.replace(config(d_model=68, num_heads=2), mesh=MeshConfig(**settings))
  assert {k: n for k, n in sharding.fitting(c).shape.items() if n > 1} == want
