"""The rows of a sample are spread over a split, the same whenever they are drawn, and no more than were asked for."""

import numpy as np
import pytest

from lns_jax.data import order, sample


def rows(count: int, T: int = 8):
  """Row i: i repeated, the last i % 3 positions padding."""
  real = lambda i: np.arange(T) < T - i % 3
  return [{'tokens': np.full(T, i, np.int32), 'segment_ids': real(i).astype(np.int32)} for i in range(count)]


def names(drawn) -> list[int]:
  return [int(row['tokens'][0]) for row in drawn]


def test_rows_are_spread_and_a_smaller_sample_is_the_start_of_a_larger_one():
  dataset = order.Rows('some', {'validation': rows(400)})
  few, many, all_of_them = (names(sample.drawn(dataset, 'validation', tokens)) for tokens in (300, 1500, 10**6))
  assert few == many[:len(few)] and many == all_of_them[:len(many)] and sorted(all_of_them) == list(range(400))
  assert 150 < np.mean(many) < 250 and np.ptp(many) > 380  # 200 and 400 if spread evenly, about 107 and 214 in order


@pytest.mark.parametrize('tokens', [1, 8, 9, 100])
def test_padding_is_no_token_and_the_sample_is_as_full_as_it_may_be(tokens):
  dataset = order.Rows('some', {'validation': rows(400)})
  drawn = sample.drawn(dataset, 'validation', tokens)
  used = sum(map(sample.size, drawn))
  assert len(drawn) == 1 or used <= tokens
  assert used > tokens - 8


def test_an_image_counts_as_one():
  dataset = order.Rows('some', {'validation': [{'images': np.zeros((2, 2, 1)), 'labels': np.array(i)} for i in range(9)]})
  assert len(sample.drawn(dataset, 'validation', 4)) == 4
