"""A diagnosis from run folders to the report: kept, taken up again, refused before anything is written."""

import dataclasses
import json

import numpy as np
import pytest

from lns_jax import diagnose, presets
from lns_jax.depth import record
from lns_jax.errors import UserError
from lns_jax.train import loop

CHOSEN = ('profile', 'layer_drop', 'theory', 'projection')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  base = presets.load_config('quickstart:tiny')
  workdir = tmp_path_factory.mktemp('diagnosed') / 'pre'
  loop.train(dataclasses.replace(base, train=dataclasses.replace(base.train, steps=2, tensorboard=False),
                                 optimizer=dataclasses.replace(base.optimizer, warmup_steps=1)), workdir)
  return workdir


def test_numbers_report_and_a_second_call_that_measures_nothing(run, tmp_path, monkeypatch):
  found = diagnose.diagnose([str(run)], tmp_path / 'out', tokens=2048, chosen=CHOSEN)
  out = tmp_path / 'out'
  written = json.loads((out / 'depth.json').read_text())
  L = written['layers']
  assert len(written['variance']) == L + 1 and len(written['layer_drop']) == L and written['tokens'] <= 2048
  assert found['models']['pre']['loss'] == written['baseline']
  page = (out / 'report.html').read_text()
  assert 'Removal of single layers' in page and 'Theory and measurement' in page and '<script' not in page
  assert len(list(out.glob('plots/*.png'))) == page.count('<svg')
  assert 'States in a plane' in page and 'projection_explained' in written and 'projection_points' not in written
  assert np.load(out / 'pre' / 'projection.npz')['projection_points'].shape[::2] == (len(written['projection_layers']), 2)
  assert list(out.glob('plots/*.svg')) and (out / 'scorecard.md').exists()
  monkeypatch.setattr(diagnose.Batches, '__iter__', lambda self: pytest.fail('a measure was taken again'))
  again = diagnose.diagnose([str(run)], out, tokens=2048, chosen=CHOSEN)
  assert again['models'] == found['models'] and json.loads((out / 'depth.json').read_text()) == written


def test_angles_are_stretched_in_the_report_and_raw_in_the_file(run, tmp_path):
  pages = {}
  for angles in ('raw', 'percentile'):  # the second takes up what the first has measured
    diagnose.diagnose([str(run)], tmp_path, tokens=1024, chosen=['profile'], angles=angles)
    pages[angles] = (tmp_path / 'report.html').read_text(), (tmp_path / 'depth.json').read_text()
  assert pages['raw'][1] == pages['percentile'][1]
  assert 'pre, rows stretched' in pages['percentile'][0] and 'rows stretched' not in pages['raw'][0]
  with pytest.raises(UserError, match="'ranks'; it is one of raw, percentile"):
    diagnose.diagnose([str(run)], tmp_path, angles='ranks')


def test_what_cannot_be_used_is_said_before_anything_is_written(run, tmp_path):
  (tmp_path / 'empty.txt').write_text('')
  for kwargs, words in (({'chosen': ['profil']}, "no measure 'profil'.*Did you mean 'profile'"),
                        ({'text': str(tmp_path / 'empty.txt')}, 'empty'),
                        ({'seq_len': 4096}, 'longer than the 128 positions')):
    with pytest.raises(UserError, match=words):
      diagnose.diagnose([str(run)], tmp_path / 'out', **kwargs)
  with pytest.raises(UserError, match='given twice'):
    diagnose.diagnose([str(run), str(run)], tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_what_a_measure_found_is_read_back_as_it_was(tmp_path):
  e = record.Estimate(np.array([1.0, np.nan]), np.zeros(2), np.ones(2), 7.0)
  record.save(tmp_path / 'x.npz', {'a': e, 'word': 'b', 'list': [1, 2]}, {'seed': 0})
  found, about = record.load(tmp_path / 'x.npz')
  assert about == {'seed': 0} and found['word'] == 'b' and found['list'] == [1, 2] and found['a'].tokens == 7
  np.testing.assert_array_equal(found['a'].value, e.value)
  (tmp_path / 'x.npz').write_bytes((tmp_path / 'x.npz').read_bytes()[:-40])
  assert record.load(tmp_path / 'x.npz') is None and record.load(tmp_path / 'y.npz') is None
