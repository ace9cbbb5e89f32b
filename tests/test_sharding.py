"""Meshes and where parameters lie."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from lns_jax import sharding
from lns_jax.config import MeshConfig
from lns_jax.errors import UserError
from tiny import model


def test_minus_one_takes_what_is_left():
  assert dict(sharding.make_mesh(MeshConfig(data=-1, fsdp=2, tensor=2)).shape) == {
      'data': 2, 'stage': 1, 'fsdp': 2, 'sequence': 1, 'tensor': 2}
  with pytest.raises(UserError, match='8 devices'):
    sharding.make_mesh(MeshConfig(data=3))
  with pytest.raises(UserError, match='8 devices'):
    sharding.make_mesh(MeshConfig(data=-1, fsdp=3))


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


def test_what_does_not_divide_is_named():
  mesh = sharding.make_mesh(MeshConfig(data=1, tensor=8))
  with pytest.raises(UserError, match=r'layers/1/attn/\w .* 8 devices of mesh.tensor'):
    sharding.params(mesh, model())
