"""FLOPs of a token, counted by hand."""

import numpy as np
import pytest

from lns_jax.layers import attention
from lns_jax.train import mfu
from tiny import model


@pytest.mark.parametrize('settings', [{}, {'sliding_window': 1}, {'sliding_window': 5}, {'sliding_window': 16},
                                      {'sliding_window': 99}, {'causal': False}])
def test_visible_keys_are_those_that_the_mask_shows(settings):
  config = model(**settings)
  ctx = attention.context(config, np.zeros((1, 16), np.int32), None)
  shown = np.asarray(attention.mask(config, ctx, 16, 1)[0]).sum(-1).mean()
  assert mfu.visible_keys(config, 16) == pytest.approx(shown, rel=1e-12)


# D 64, F 128, L 2, H 4, K 2, h 16, V 256: q and o 64 * 64, k and v 64 * 32, an MLP matrix 64 * 128, the head 64 * 256
@pytest.mark.parametrize('settings, weights, keys', [
    ({}, 2 * (2 * 4096 + 2 * 2048 + 3 * 8192) + 16384, 5),
    ({'mlp': 'gelu', 'causal': False}, 2 * (2 * 4096 + 2 * 2048 + 2 * 8192) + 16384, 9),
    ({'sliding_window': 3, 'tie_embeddings': True}, 2 * (2 * 4096 + 2 * 2048 + 3 * 8192) + 16384, (1 + 2 + 7 * 3) / 9),
])
def test_flops_by_hand(settings, weights, keys):
  # scores and weighted values: 2 * 16 FLOPs a key, head and layer each
  expected = 3 * (2 * weights + 2 * 2 * 16 * 4 * 2 * keys)
  assert mfu.flops_per_token(model(**settings), 9) == pytest.approx(expected, rel=1e-12)


def test_norms_and_biases_count_nothing():
  assert mfu.flops_per_token(model(bias='all', qk_norm='full', clip_qkv=1.0, scheme='lns'), 9) == (
      mfu.flops_per_token(model(), 9))
