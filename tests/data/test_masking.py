"""Rows of masked language modelling: what is hidden, how often, and that it depends on the seed and the row alone."""

import numpy as np
import pytest

from lns_jax.config import DataConfig
from lns_jax.data import masking, sample, tokenizers
from lns_jax.errors import UserError
import wordpiece

TOKENIZER = wordpiece.make()
V = TOKENIZER.vocab_size
CLS, SEP, MASK = 2, 3, 4


def plain(n, T=None):
  ids = np.random.default_rng(0).integers(5, V, n).astype(np.int32)
  return next(masking.rows(ids, T or n + 2, TOKENIZER))


def test_the_tokenizer_has_its_special_tokens():
  assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.mask_id) == (CLS, SEP, MASK)
  assert tokenizers.byte_tokenizer().mask_id is None
  assert list(TOKENIZER.encode('[MASK] sun')) != [MASK, wordpiece.VOCAB['sun']]  # text that spells it is text


def test_a_document_becomes_rows_between_its_ends():
  ids = np.arange(10, 21)
  first, second, third = masking.rows(ids, 6, TOKENIZER)
  np.testing.assert_array_equal(first['tokens'], [CLS, 10, 11, 12, 13, SEP])
  np.testing.assert_array_equal(second['tokens'], [CLS, 14, 15, 16, 17, SEP])
  np.testing.assert_array_equal(third['tokens'], [CLS, 18, 19, 20, SEP, 0])
  np.testing.assert_array_equal(third['segment_ids'], [1, 1, 1, 1, 1, 0])


@pytest.mark.parametrize('n, hidden', [(100, 15), (20, 3), (10, 2), (3, 1), (1, 1)])
def test_15_per_cent_of_the_text_are_to_be_predicted(n, hidden):
  row = plain(n, 110)
  found = masking.hide(row, TOKENIZER, seed=0, number=0)
  at = found['weights'] > 0
  assert at.sum() == hidden
  np.testing.assert_array_equal(found['targets'], np.where(at, row['tokens'], -100))
  np.testing.assert_array_equal(found['tokens'][~at], row['tokens'][~at])
  assert found['tokens'][0] == CLS and found['tokens'][n + 1] == SEP and not at[n + 1:].any() and not at[0]


def test_80_per_cent_are_masked_10_random_10_kept():
  row = plain(4000)
  found = [masking.hide(row, TOKENIZER, seed=1, number=i) for i in range(20)]
  hidden = np.concatenate([f['tokens'][f['weights'] > 0] for f in found])
  right = np.concatenate([f['targets'][f['weights'] > 0] for f in found])
  assert len(hidden) == 12000
  # Standard errors are 0.4 %, 0.3 % and 0.3 %; a random token is the right one, or the mask, once in V each.
  assert np.mean(hidden == MASK) == pytest.approx(0.8 + 0.1 / V, abs=0.015)
  assert np.mean(hidden == right) == pytest.approx(0.1 + 0.1 / V, abs=0.012)
  other = hidden[(hidden != right) & (hidden != MASK)]
  assert np.ptp(np.bincount(other, minlength=V)[[*range(4), *range(5, V)]]) < 40 and len(set(other)) == V - 1


def test_what_is_hidden_depends_on_the_seed_and_the_row():
  row = plain(60)
  same, again, other, seed = (masking.hide(row, TOKENIZER, seed=s, number=n)
                              for s, n in ((3, 5), (3, 5), (3, 6), (4, 5)))
  for name in same:
    np.testing.assert_array_equal(same[name], again[name])
  assert (same['weights'] != other['weights']).any() and (same['weights'] != seed['weights']).any()


def test_rows_of_text(tmp_path):
  (tmp_path / 'a.txt').write_text('the sun is big. ' * 40)
  data = DataConfig(source=str(tmp_path / 'a.txt'), seq_len=20)
  whole, _, _ = sample.encoder_rows(data, TOKENIZER, 10**6, hidden=False)
  text = TOKENIZER.encode('the sun is big. ' * 40)
  assert len(whole) == -(-len(text) // 18) and all(set(row) == {'tokens', 'segment_ids'} for row in whole)
  assert sum(row['segment_ids'].sum() - 2 for row in whole) == len(text)
  hidden, digest, _ = sample.encoder_rows(data, TOKENIZER, 10**6, hidden=True)
  few, same, _ = sample.encoder_rows(data, TOKENIZER, 60, hidden=True)
  assert len(few) == 3 and digest == same
  everything = {row['tokens'].tobytes() for row in hidden}
  assert all(row['tokens'].tobytes() in everything for row in few)  # the size of the sample changes no row
  assert all(row['weights'].sum() >= 1 for row in hidden)


def test_refusals(tmp_path):
  (tmp_path / 'a.txt').write_text('sun')
  data = DataConfig(source=str(tmp_path / 'a.txt'), seq_len=20)
  with pytest.raises(UserError, match=r'tokenizer byte has no mask such as \[MASK\]'):
    sample.encoder_rows(data, tokenizers.byte_tokenizer(), 100, hidden=True)
  with pytest.raises(UserError, match='2 positions .* 3 would'):
    masking.check(TOKENIZER, 2, hidden=False)
