"""An estimate by hand numbers, the table of chips, and what is tried when a run does not fit."""

import jax
import pytest

from lns_jax import config as config_lib
from lns_jax.aot import compile_tpu, fit, hlo, roofline, table
from lns_jax.errors import UserError
from lns_jax.train import chips, mfu
from tiny import model

# 100 TFLOP/s, 1 TB/s, 100 GB/s to its slice and 10 GB/s to others.
CHIP = chips.Chip(('none',), 100, 1e9, 1e12, 100e9, 10e9, 2, 4)
# Three turns of a product of 2 x 1e12 FLOPs on 3e8 bytes and a sum of 4e8; then a copy of 4e8 bytes to and fro.
PROGRAM = hlo.parse("""HloModule m
%body (p: (s32[], f32[10000,10000])) -> (s32[], f32[10000,10000]) {
  %p = (s32[], f32[10000,10000]) parameter(0)
  %i = s32[]{:S(2)} get-tuple-element(%p), index=0
  %x = f32[10000,10000] get-tuple-element(%p), index=1
  %y = f32[10000,10000] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = f32[10000,10000]{1,0:S(1)} all-reduce(%y), replica_groups={{0,1},{2,3}}, channel_id=1, to_apply=%add
  ROOT %t = (s32[], f32[10000,10000]) tuple(%i, %z)
}
%cond (q: (s32[], f32[10000,10000])) -> pred[] {
  %q = (s32[], f32[10000,10000]) parameter(0)
  ROOT %c = pred[]{:S(2)} constant(false)
}
ENTRY %main (a: f32[10000,10000]) -> f32[10000,10000] {
  %a = f32[10000,10000] parameter(0)
  %n = s32[]{:S(2)} constant(0)
  %s = (s32[], f32[10000,10000]) tuple(%n, %a)
  %w = (s32[], f32[10000,10000]) while(%s), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %o = f32[10000,10000] get-tuple-element(%w), index=1
  ROOT %r = f32[10000,10000] copy(%o)
}
""")


@pytest.mark.parametrize('slices, ici, dcn', [
    ([0, 0, 0, 0], 12e8, 0), ([0, 0, 1, 1], 12e8, 0), ([0, 1, 0, 1], 0, 12e8)])
def test_an_estimate_by_hand(slices, ici, dcn):
  done = roofline.work(PROGRAM, CHIP, 1.0, slices)
  assert done.flops == 3 * 2e12 and done.unknown == ()
  moved = 3 * (3 * 4e8 + 4e8) + 2 * 4e8  # the sum's result stays in vector memory
  assert done.hbm_bytes == moved
  assert (done.ici_bytes, done.dcn_bytes) == (ici, dcn)  # twice a half of 4e8, three times
  times = roofline.estimate(done, CHIP)
  # A product takes 0.02 s to compute and 0.0012 to move, a sum moves 4e8 bytes, the copy 8e8.
  busy, network = 3 * (0.02 + 4e-4) + 8e-4, ici / 100e9 + dcn / 10e9
  assert times['busy_seconds'] == pytest.approx(busy)
  assert times['compute_seconds'] == pytest.approx(0.06) and times['memory_seconds'] == pytest.approx(moved / 1e12)
  assert times['step_seconds'] == pytest.approx(max(busy, network))
  assert times['serial_seconds'] == pytest.approx(busy + network)


def test_speed_is_of_all_chips():
  found = roofline.speed(model_flops=8e12, tokens=4096, chips=4, chip=CHIP, seconds=0.1)
  assert found == {'mfu': pytest.approx(8e12 / (4 * 1e14 * 0.1)), 'tokens_per_second': pytest.approx(40960)}


# Four heads of 512 queries on a device, two heads of 2048 keys that it gathered: results may be of either shape.
KERNEL = """HloModule m
ENTRY %main (q: bf16[{rows}4,512,64], k: bf16[{rows}2,2048,64]) -> bf16[{rows}2,2048,64] {{
  %i = s8[1,1,2] constant(0)
  %q = bf16[{rows}4,512,64] parameter(0)
  %k = bf16[{rows}2,2048,64] parameter(1)
  ROOT %{name}.3 = (f32[2,512], bf16[{rows}2,2048,64]) custom-call(%i, %q, %k, %k), custom_call_target="tpu_custom_call"
}}
"""


@pytest.mark.parametrize('rows, B', [('2,', 2), ('', 1)])  # one row has no axis of its own
@pytest.mark.parametrize('name, products', [
    ('splash_mha_fwd_residuals', 2), ('splash_mha_dq_x', 3), ('splash_mha_dkv', 4)])
def test_a_kernel_counts_its_products_with_the_keys_that_a_query_sees(name, products, rows, B):
  done = roofline.work(hlo.parse(KERNEL.format(name=name, rows=rows)), CHIP, 256.5, [0])
  assert done.flops == done.kernel_flops == products * 2 * (B * 4 * 512) * 256.5 * 64


def test_an_unknown_kernel_is_named():
  done = roofline.work(hlo.parse(KERNEL.format(name='other', rows='2,')), CHIP, 1.0, [0])
  assert done.flops == 0 and done.unknown == ('other.3',)


@pytest.mark.parametrize('topology, shape', [('v5e:4x4', (4, 4)), ('v5p:2x2x1', (2, 2, 1)), ('v4:4x4x8', (4, 4, 8)),
                                             ('v6e:16x16', (16, 16)), ('v7x:4x4x4', (4, 4, 4)), ('v5e:1x1', (1, 1))])
def test_topologies_are_those_that_are_lent(topology, shape):
  assert chips.parse(topology) == (topology.partition(':')[0], shape)


@pytest.mark.parametrize('topology, words', [
    ('v5e:4x3', ['v5e:4x4', 'v5e:2x4']), ('v5e:4x2', ['v5e:2x4']), ('v5e:32x32', ['v5e:16x16']),
    ('v5f:4x4', ["'v5f'", "'v5p'", 'v6e']), ('v5e-16', ['v5e:4x4.']), ('v5litepod-4', ['v5e:2x2.']),
    ('v4-32', ['v4:2x2x4.']), ('v5e-x', ["'v5e-x'"]), ('v5p:4x4', ['v5p:2x2x4']),
    ('v5e', ['v5e:1x1']), ('v4:99999999999x1', ['v4:'])])
def test_another_topology_is_refused_with_the_nearest(topology, words):
  with pytest.raises(UserError) as error:
    chips.parse(topology)
  assert all(w in str(error.value) for w in words), error.value


def test_the_lines_of_a_small_program_keep_their_digits():
  seconds = {f'{of}_seconds': 2.5e-6 for of in ('compute', 'memory', 'ici', 'step', 'serial')} | {'dcn_seconds': 0.0}
  sizes = {f'{of}_bytes': 1_787_904 for of in ('argument', 'temp', 'output', 'code')} | {'host_bytes': 0}
  text = table.of({
      'hbm_bytes_per_chip': 7_169_536, 'hbm_limit': 16_911_433_728, 'fits': True, **sizes, 'flops': 138_412_032.0,
      'kernel_flops': 0.0, 'saving_bytes': 3_575_808, 'model_flops': 453_771_264.0, 'bytes': 1_846_548.0, 'fusions': 2,
      'not_counted': [],
      'collectives': {'all-reduce': {'count': 9, 'bytes': 214_236}}, 'compile_seconds': 31.0, 'devices': 4, 'slices': 1,
      'roofline': {**seconds, 'mfu': 0.2, 'tokens_per_second': 1e6}, 'topology': 'v5e:2x2', 'status': 'compiled',
      'libtpu': '0.0.52', 'eval': {'hbm_bytes_per_chip': 20e9, 'hbm_limit': 16_911_433_728, 'fits': False, 'flops': 1.0,
                                   'roofline': {'step_seconds': 1e-3}}})
  for words in ('4 devices of v5e:2x2, compiled (libtpu 0.0.52)',
                'evaluation   20.0 of 16.9 GB a chip: too much, 1.00 ms',
                '0.00717 of 16.9 GB a chip: fits', 'argument 0.00179', '9 x, 0.000214 GB', '0.000138 T a chip',
                'saving       0.00358 of 16.9 GB a chip: fits', 'compute 0.00250, ', 'step         0.00250 ms at best'):
    assert words in text, text


def test_the_peaks_of_chips_are_those_that_training_counts_with():
  for chip in chips.CHIPS.values():
    for kind in chip.kinds:
      found = next(peak for name, peak in mfu.PEAK_TFLOPS.items() if kind.startswith(name))
      assert found == chip.tflops, kind


def test_the_peaks_are_those_of_a_device():
  """The vendor's of a chip, in bfloat16; of v3 and v7x JAX's device is half of one."""
  chips_of = {'TPU v3': 123 / 2, 'TPU v4': 275, 'TPU v5 lite': 197, 'TPU v5p': 459, 'TPU v6 lite': 918,
              'TPU7x': 2307 / 2}
  assert {kind: mfu.PEAK_TFLOPS[kind] for kind in chips_of} == chips_of


RUN = config_lib.RunConfig(train=config_lib.TrainConfig(steps=1, batch_size=4))


def changed(remat='none', data=-1, fsdp=1, accumulation=1):
  return config_lib.changed(RUN, {'model': {'remat': remat}, 'mesh': {'data': data, 'fsdp': fsdp},
                                  'train': {'accumulation': accumulation},
                                  'eval': {'batch_size': 4 // accumulation if accumulation > 1 else 0}})


def test_what_is_tried_goes_from_remat_over_fsdp_to_accumulation():
  tried = [config_lib.changed(RUN, c) for c in fit.steps(RUN, possible)]
  assert tried == [changed('names'), changed('full'), changed('full', 1, -1), changed('full', 1, -1, 2),
                   changed('full', 1, -1, 4)]
  offloads = changed('offload', 1, -1)
  assert [config_lib.changed(offloads, c) for c in fit.steps(offloads, possible)] == [
      changed('offload', 1, -1, 2), changed('offload', 1, -1, 4)]


def possible(change):
  return True


@pytest.mark.parametrize('mesh, loop', [
    ({'data': 2, 'stage': 4}, 'scan'), ({'fsdp': 4, 'stage': 2}, 'scan'), ({'data': 1, 'fsdp': 8}, 'scan'),
    ({'data': 1, 'fsdp': 2, 'tensor': 2, 'stage': 2, 'slices': 0}, 'scan'), ({'fsdp': 4, 'data': 2}, 'unrolled')])
def test_what_a_save_takes_is_what_its_program_takes(mesh, loop):
  """As the compiler counts what goes into the conversion of the layout, and what comes out, 8 bytes of address each."""
  settings = model(num_layers=4, d_model=32, vocab_size=64, loop=loop)
  run = config_lib.RunConfig(model=settings, train=config_lib.TrainConfig(steps=1, batch_size=8),
                             mesh=config_lib.MeshConfig(**mesh))
  program = compile_tpu.Target(CHIP, tuple(jax.devices())).program(run)
  state = program.abstract_state()
  memory = jax.jit(program.to_canonical).lower((state.params, state.opt_state)).compile().memory_analysis()
  taken = memory.argument_size_in_bytes + (memory.output_size_in_bytes if loop == 'scan' else 0)
  arrays = len(jax.tree.leaves(program.canonical().abstract_state()))
  assert -32 <= taken - compile_tpu.saving(program) <= 8 * arrays


@pytest.mark.parametrize('mesh, sharded', [
    ({'slices': 2}, {'data': 2, 'fsdp': -1}),  # the slow network is left to `data`
    ({'slices': 2, 'across': 'stage', 'stage': 2}, {'data': 1, 'fsdp': -1}),
    ({'data': 4, 'fsdp': 2, 'tensor': -1}, {'data': 1, 'fsdp': 8}),
    ({'data': 4, 'tensor': -1, 'slices': 2}, {'data': 2, 'fsdp': 2})])
def test_fsdp_is_tried_on_any_mesh(mesh, sharded):
  run = config_lib.changed(RUN, {'mesh': mesh, 'model': {'remat': 'full', 'loop': 'scan'}})
  tried = list(fit.steps(run, possible))
  assert [t.get('mesh') for t in tried] == [sharded] * 3
  assert [t.get('mesh') for t in fit.steps(run, lambda change: False)] == [None] * 2  # by accumulation alone


@pytest.mark.parametrize('fits, flags', [
    (changed('names'), ['--config.model.remat=names']),
    (changed('full', 1, -1), ['--config.model.remat=full', '--config.mesh.data=1', '--config.mesh.fsdp=-1']),
    (None, None)])
def test_the_first_that_fits_is_named_by_its_flags(fits, flags):
  compile = lambda c: {'fits': c == fits}
  assert fit.nearest(RUN, compile, smallest=lambda c: 5, limit=10) == flags


def test_where_the_state_alone_is_too_large_nothing_is_compiled():
  compiled = []
  def compile(c):
    compiled.append(c)
    return {'fits': True}
  found = fit.nearest(RUN, compile, smallest=lambda c: 20 if c.mesh.fsdp == 1 else 5, limit=10)
  assert found[-1] == '--config.mesh.fsdp=-1' and len(compiled) == 1
