"""Reading compiled programs: loops turn as often as they do, products and collectives are those counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from lns_jax.aot import costs, hlo, roofline, traffic
from lns_jax.train import chips


def program(f, *arguments) -> hlo.Program:
  return hlo.parse(jax.jit(f).lower(*arguments).compile().as_text())


def flops(p: hlo.Program) -> int:
  return sum(times * costs.flops(p, i, c) for i, c, times in p.executed())


def hbm_bytes(p: hlo.Program) -> int:
  return sum(times * traffic.hbm_bytes(p, i, c) for i, c, times in p.executed())


def ones(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_product_counts_two_for_each_entry_and_contracted_index():
  product = lambda a, b: jnp.einsum('nij,njk->nik', a, b)
  assert flops(program(product, ones(3, 4, 5), ones(3, 5, 6))) == 2 * 3 * 4 * 5 * 6


def test_the_body_of_a_scan_counts_its_turns_also_inside_of_another():
  def layer(x, w):
    return jnp.tanh(x @ w), None
  scanned = lambda x, ws: jax.lax.scan(layer, x, ws)[0]
  assert flops(program(scanned, ones(8, 16), ones(5, 16, 16))) == 5 * 2 * 8 * 16 * 16
  twice = lambda x, ws: jax.lax.scan(lambda x, _: (scanned(x, ws), None), x, None, length=3)[0]
  assert flops(program(twice, ones(8, 16), ones(5, 16, 16))) == 3 * 5 * 2 * 8 * 16 * 16


def test_a_gradient_with_remat_counts_what_it_computes_again():
  """By hand: forward 1, again 1, and two products behind each: 4 a layer, less the last product, which nobody reads."""
  def loss(x, ws):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None), prevent_cse=False)
    return jnp.sum(jax.lax.scan(layer, x, ws)[0])
  one = 2 * 8 * 16 * 16
  assert flops(program(jax.grad(loss, (0, 1)), ones(8, 16), ones(5, 2, 16, 16))) == 5 * (2 + 2 + 4) * one


def loops(p):
  return [p.trips(i, c) for i, c, _ in p.executed() if i.opcode == 'while']


# A loop as libtpu writes it: no note of its turns; the counter's bound is a constant, or carried from the start.
LOOP = """HloModule m
%body (p: (s32[], s32[], f32[4])) -> (s32[], s32[], f32[4]) {{
  %p = (s32[]{{:T(128)}}, s32[], f32[4]{{0:T(128)S(1)}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %x = f32[4] get-tuple-element(%p), index=2
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %t = (s32[], s32[], f32[4]) tuple(%next, %n, %x)
}}
%cond (q: (s32[], s32[], f32[4])) -> pred[] {{
  %q = (s32[], s32[], f32[4]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%j, {bound}), direction={direction}
}}
ENTRY %main (a: f32[4]) -> (s32[], s32[], f32[4]) {{
  %a = f32[4] parameter(0)
  %zero = s32[] constant(0)
  %seven = s32[] constant(7)
  %bound = s32[] copy(%seven)
  %start = (s32[], s32[], f32[4]) tuple(%zero, %bound, %a)
  ROOT %loop = (s32[], /*index=1*/s32[], f32[4]) while(%start), condition=%cond, body=%body, metadata={{op_name="f(x)"}}
}}
"""


@pytest.mark.parametrize('bound, direction, step, turns', [
    ('%five', 'LT', 1, 5), ('%m', 'LT', 1, 7), ('%m', 'LE', 1, 8), ('%m', 'LT', 2, 4), ('%m', 'NE', 1, None)])
def test_turns_are_read_from_start_step_and_bound(bound, direction, step, turns):
  assert loops(hlo.parse(LOOP.format(bound=bound, direction=direction, step=step))) == [turns]


def test_an_element_that_is_named_by_its_number_is_the_same_element():
  """As newer compilers write it, `%p#0` for `%i`: the turns and bytes of the longer text."""
  longer = LOOP.format(bound='%m', direction='LT', step=1)
  for ours, theirs in {'%x = f32[4]': '%x = f32[4]{0:T(128)S(1)}', '%n, %x)': '%n, %y)',
                       '  ROOT %t': '  %y = f32[4] add(%x, %x)\n  ROOT %t'}.items():
    longer = longer.replace(ours, theirs)
  shorter = '\n'.join(line for line in longer.splitlines() if 'get-tuple-element' not in line)
  for name, element in {
      '%i,': '%p#0,', '%n,': '%p#1,', '%x, %x)': '%p#2, %p#2)', '%j,': '%q#0,', '%m)': '%q#1)'}.items():
    assert name in shorter
    shorter = shorter.replace(name, element)
  # A bound is copied (8 bytes); in each turn a step added (12) and x + x, which lies in vector memory, written (16).
  for text in (longer, shorter):
    assert loops(hlo.parse(text)) == [7] and hbm_bytes(hlo.parse(text)) == 8 + 7 * (12 + 16)


def test_an_element_of_an_element_has_its_own_type():
  p = hlo.parse("""ENTRY %main (a: ((f32[2], bf16[3,2]), s32[])) -> bf16[3,2] {
  %a = ((f32[2]{0:T(2,128)}, /*index=1*/bf16[3,2]{1,0:T(8,128)(2,1)S(1)}), s32[]) parameter(0)
  ROOT %b = bf16[3,2] negate(%a#0#1)
}
""").computations['main']
  assert p['b'].operands == ('a#0#1',) and p['a#0#1'].operands == ('a#0',) and p['a#0'].operands == ('a',)
  assert p['a#0#1'].arrays == (hlo.Array('bf16', (3, 2), 1),) and [x.dtype for x in p['a#0'].arrays] == ['f32', 'bf16']


def test_turns_that_depend_on_data_are_not_known():
  p = program(lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x + 1, x), ones(4))
  assert loops(p) == [None]
  assert loops(program(lambda x: jax.lax.fori_loop(3, 10, lambda i, x: jnp.sin(x), x), ones(4))) == [7]


@pytest.mark.parametrize('window, inputs, outputs, met', [
    (dict(size=3, stride=1, pad=1, lhs_dilate=1, rhs_dilate=1), 4, 4, 10),  # 12 pairs, two of them in the padding
    (dict(size=3, stride=1, pad=2, lhs_dilate=2, rhs_dilate=1), 3, 5 + 4 - 2, 9),  # each of 3 entries meets all 3
    (dict(size=2, stride=2, pad=0, lhs_dilate=1, rhs_dilate=2), 5, 2, 4)])
def test_a_convolution_counts_where_it_meets_its_input(window, inputs, outputs, met):
  assert costs._meetings(inputs, outputs, window) == met


def test_a_convolution_counts_as_the_compiler_does():
  conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 2), padding=((1, 2), (0, 1)),
                           lhs_dilation=(2, 1), rhs_dilation=(1, 2), dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
  lowered = jax.jit(conv).lower(ones(2, 6, 7, 3), ones(3, 2, 3, 5))
  compiled = lowered.compile()
  p = hlo.parse(compiled.as_text())
  assert any(i.opcode == 'convolution' for c in p.computations.values() for i in c.values())
  assert flops(p) == lowered.cost_analysis()['flops'] > 0


def test_collectives_count_their_turns_and_bytes():
  """On 2 x 4 devices: 3 sums of 16 floats over all, a gather of [4, 2] to [16, 2] over 4, one pass of 8 floats."""
  mesh = jax.make_mesh((2, 4), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  def f(x, y, z):
    total = jax.lax.scan(lambda t, v: (jnp.sin(t + jax.lax.psum(v, ('a', 'b'))), None), jnp.zeros(16), x)[0]
    passed = jax.lax.ppermute(z, 'b', [(i, (i + 1) % 4) for i in range(4)])
    return total, jax.lax.all_gather(y, 'b', tiled=True), passed
  mapped = jax.shard_map(f, mesh=mesh, in_specs=(P(), P('b'), P('b')), out_specs=(P(), P(), P('b')),
                         check_vma=False)
  found = costs.collectives(program(mapped, ones(3, 16), ones(16, 2), ones(32)), 8)
  assert costs.by_kind(found) == {
      'all-reduce': {'count': 3, 'bytes': 3 * 64}, 'all-gather': {'count': 1, 'bytes': 128},
      'collective-permute': {'count': 1, 'bytes': 32}}
  sent = {c.kind: c.times * c.sent for c in found}
  assert sent == {'all-reduce': 3 * 2 * 7 / 8 * 64, 'all-gather': 3 / 4 * 128, 'collective-permute': 32}
  groups = {c.kind: set(map(frozenset, c.groups)) for c in found}
  rows = {frozenset(range(4)), frozenset(range(4, 8))}
  assert groups['all-reduce'] == {frozenset(range(8))} and groups['all-gather'] == rows
  assert groups['collective-permute'] == {frozenset((4 * a + i, 4 * a + (i + 1) % 4)) for a in (0, 1) for i in range(4)}


@pytest.mark.parametrize('text, groups', [
    ('replica_groups={{0,2},{1,3}}, channel_id=1', ((0, 2), (1, 3))),
    ('replica_groups=[2,2]<=[4], x', ((0, 1), (2, 3))),
    ('replica_groups=[2,2]<=[2,2]T(1,0)', ((0, 2), (1, 3))),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}, x", ((0, 2), (1, 3))),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0','axis_1'}", ((0, 1, 2, 3),)),
    ('source_target_pairs={{0,1},{3,2}}', ((0, 1), (3, 2))), ('replica_groups={}', ((0, 1, 2, 3),))])
def test_who_takes_part_is_read_in_every_form(text, groups):
  assert costs.groups(hlo.Instruction('a', 'all-reduce', (), (), '', text, False), 4) == groups


# A collective that runs beside a product is in the text once a step, with one channel.
ASYNC = """HloModule m
%step (p: f32[2,8], q: f32[8,8]) -> (f32[2,8], f32[8,8]) {
  %p = f32[2,8] parameter(0)
  %q = f32[8,8] parameter(1)
  %g = f32[8,8] all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
  %d = f32[2,8] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (f32[2,8], f32[8,8]) tuple(%d, %g)
}
ENTRY %main (a: f32[2,8], b: f32[8,8]) -> f32[2,8] {
  %a = f32[2,8] parameter(0)
  %b = f32[8,8] parameter(1)
  %one = (f32[2,8], f32[8,8]) fusion(%a, %b), kind=kOutput, calls=%step
  %x = f32[2,8] get-tuple-element(%one), index=0
  %two = (f32[2,8], f32[8,8]) fusion(%x, %b), kind=kOutput, calls=%step
  ROOT %y = f32[2,8] get-tuple-element(%two), index=0
}
"""


def test_the_steps_of_one_collective_count_once_and_its_products_each():
  p = hlo.parse(ASYNC)
  assert costs.by_kind(costs.collectives(p, 4)) == {'all-gather': {'count': 1, 'bytes': 256}}
  assert flops(p) == 2 * (2 * 2 * 8 * 8)


def test_what_a_chip_hands_to_other_slices_is_a_collective_over_slices():
  p = hlo.parse("""HloModule m
ENTRY %main (a: f32[8]) -> token[] {
  %a = f32[8] parameter(0)
  %t = token[] after-all()
  ROOT %s = (f32[8], u32[], token[]) send(%a, %t), channel_id=2, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
}
""")
  found = costs.collectives(p, 4)
  assert costs.by_kind(found) == {'all-reduce over slices': {'count': 1, 'bytes': 32}}
  done = roofline.work(p, chips.CHIPS['v5e'], 1.0, [0, 0, 1, 1])
  assert (done.dcn_bytes, done.ici_bytes) == (32, 0)


def test_bytes_are_those_read_and_written():
  assert hbm_bytes(program(lambda x, y: jnp.sin(x) + y, ones(1000), ones(1000))) == 3 * 4000


# A fusion that reads one of 12 rows, of another in vector memory, and writes one row of a third in place.
SLICED = """HloModule m
%f (p: f32[12,100], q: f32[12,100], r: f32[12,100], i: s32[]) -> f32[12,100] {
  %p = f32[12,100] parameter(0)
  %q = f32[12,100] parameter(1)
  %r = f32[12,100] parameter(2)
  %i = s32[] parameter(3)
  %z = s32[] constant(0)
  %b = f32[12,100] bitcast(%p)
  %s = f32[1,100] dynamic-slice(%b, %i, %z), dynamic_slice_sizes={1,100}
  %u = f32[1,100] dynamic-slice(%q, %i, %z), dynamic_slice_sizes={1,100}
  %v = f32[1,100] add(%s, %u)
  ROOT %w = f32[12,100] dynamic-update-slice(%r, %v, %i, %z)
}
ENTRY %main (a: f32[12,100], b: f32[12,100], c: f32[12,100], n: s32[]) -> f32[12,100] {
  %a = f32[12,100] parameter(0)
  %b = f32[12,100]{1,0:T(8,128)S(1)} parameter(1)
  %c = f32[12,100] parameter(2)
  %n = s32[]{:S(2)} parameter(3)
  ROOT %o = f32[12,100] fusion(%a, %b, %c, %n), kind=kLoop, calls=%f
}
"""


def test_of_a_slice_only_the_slice_moves_and_vector_memory_is_free():
  assert hbm_bytes(hlo.parse(SLICED)) == 400 + 400


# A slice that is fetched beside other work, as JAX writes it and as libtpu does.
FETCHED = """HloModule m
%fetch (p: f32[12,100]) -> f32[1,100] {
  %p = f32[12,100] parameter(0)
  ROOT %s = f32[1,100]{LAYOUT} slice(%p), slice={[3:4], [0:100]}
}
ENTRY %main (a: f32[12,100]) -> f32[1,100] {
  %a = f32[12,100] parameter(0)
  %slice-start = ((f32[12,100]), f32[1,100]{LAYOUT}, s32[]{:S(2)}) START
  ROOT %slice-done = f32[1,100]{LAYOUT} DONE(%slice-start)
}
"""


@pytest.mark.parametrize('start, done', [
    ('slice-start(%a), slice={[3:4], [0:100]}', 'slice-done'), ('async-start(%a), calls=%fetch', 'async-done')])
@pytest.mark.parametrize('layout, moved', [('1,0:T(8,128)S(1)', 400), ('1,0:T(8,128)', 800)])
def test_a_slice_that_is_fetched_beside_other_work_moves_once(start, done, layout, moved):
  """100 floats are read, and written where they do not go to vector memory; never the 12 rows they are of."""
  text = FETCHED.replace('LAYOUT', layout).replace('START', start).replace('DONE', done)
  assert hbm_bytes(hlo.parse(text)) == moved


def test_types_of_all_widths_have_their_bytes():
  found = hlo.arrays('(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, pred[], f8e4m3fn[5], s4[6], token[], u32[]{:S(2)})')
  assert [a.nbytes for a in found] == [12, 1, 5, 3, 0, 4]
  assert [a.space for a in found] == [1, 0, 0, 0, 0, 2]
