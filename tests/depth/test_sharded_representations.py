"""Eight devices give the digits of one."""

import jax
import numpy as np
import pytest

from lns_jax import sharding
from lns_jax.config import MeshConfig
from lns_jax.depth.lens import logit_lens
from lns_jax.depth.linear import replaceability
from lns_jax.depth.similarity import cka
from tiny import batch, model, params


@pytest.mark.parametrize('measure', [
    pytest.param(logit_lens, marks=pytest.mark.slow), pytest.param(replaceability, marks=pytest.mark.slow), cka])
def test_eight_devices_give_the_digits_of_one(measure):
  config = model(vocab_size=40, d_model=16, d_ff=32, scheme='lns', loop='scan')
  p, b = params(config), batch(vocab=40, rows=8)
  alone = measure(config, p, [b])
  mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  with sharding.use(mesh):
    spread = measure(config, jax.device_put(p, sharding.params(mesh, config)),
                     [jax.device_put(b, sharding.batch(mesh))])
  for name in alone:
    np.testing.assert_allclose(spread[name].value, alone[name].value, rtol=1e-4, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(spread[name].low, alone[name].low, rtol=1e-3, atol=1e-5, err_msg=name)
