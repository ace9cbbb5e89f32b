"""Effective depth by hand on curves that one can see at a glance."""

import numpy as np
import pytest

from lns_jax import depth
from lns_jax.depth import effective
from tiny import batch, model, params

NONE = np.nan


@pytest.mark.parametrize('cosine, layer', [
    ([-.3, -.1, .1, .2], 2),  # layer 2 is the last that erases
    ([-.3, .1, -.2, 0.], 3),  # the last turn counts, and 0 is no longer negative
    ([-.3, .1, .2, -.1], 1),
    ([.1, .2, -.3, -.1], NONE), ([-.1, -.2, -.3, -.4], NONE), ([.1, .2, .3, .4], NONE), ([-.1], NONE),
    ([NONE, -.1, .2, .3], 2),
])
def test_the_last_layer_whose_cosine_is_negative_before_one_whose_is_not(cosine, layer):
  assert effective.by_cosine(np.array(cosine)) == pytest.approx(layer, nan_ok=True)


@pytest.mark.parametrize('kl, layer', [
    ([4., 8., 3.9, 1., 0.], 3),  # 3.9 enters layer 3
    ([3., 8., 3., 1., 0.], 1),   # below half of a maximum that comes later
    ([8., 8., 8., 1., 0.], 4),   # what enters the last layer still counts
    ([8., 8., 8., 4., 0.], NONE), ([0., 0., 0., 0., 0.], NONE),
])
def test_the_first_layer_entered_by_less_than_half_of_the_largest_kl(kl, layer):
  assert effective.by_kl(np.array(kl)) == pytest.approx(layer, nan_ok=True)


@pytest.mark.parametrize('overlap, layer', [
    ([0., .3, .31, .2, 1.], 3), ([.4, .1, .1, .1, 1.], 1), ([0., 0., 0., .5, 1.], 4), ([0., .1, .2, .3, 1.], NONE)])
def test_the_first_layer_entered_by_an_overlap_above_three_tenths(overlap, layer):
  assert effective.by_overlap(np.array(overlap)) == pytest.approx(layer, nan_ok=True)


def test_thresholds_are_those_of_the_call():
  curve = np.array([4., 8., 3.9, .7, 0.])
  assert effective.by_kl(curve, share=0.1) == 4 and effective.by_overlap(curve, least=5) == 2


def test_replicates_are_read_one_by_one():
  found = effective.by_overlap(np.array([[0., 0., 1.], [1., 0., 1.], [0., 1., 1.]]))
  np.testing.assert_array_equal(found, [NONE, 1, 2])


def test_the_profile_has_the_depth_of_its_own_cosines_among_the_layers_that_are_left():
  config = model(num_layers=5, layer_ids=(1, 3, 4, 6, 8), depth=8)
  found = depth.profile(config, params(config), [batch(seed=s) for s in range(3)])
  mean = (found['attn_cosine'].value + found['mlp_cosine'].value + found['layer_cosine'].value) / 3
  layers = [l for l in range(1, 5) if mean[l - 1] < 0 <= mean[l]]
  e, ratio = found['effective_depth_cosine'], found['effective_ratio_cosine']
  assert layers and e.value == layers[-1] and ratio.value == layers[-1] / 5
  assert e.low <= e.value <= e.high and ratio.high == e.high / 5 and e.tokens == found['variance'].tokens
