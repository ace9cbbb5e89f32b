"""A manifest notices every change to a folder's files, and names the file."""

import hashlib
import json
import os

import pytest

from lns_jax.train import manifest


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'params' / 'd').mkdir(parents=True)
  (tmp_path / 'config').mkdir()
  (tmp_path / 'params' / 'd' / 'a').write_bytes(bytes(range(256)) * 20)
  (tmp_path / 'config' / 'metadata').write_text('{}')
  (tmp_path / 'empty').touch()
  manifest.write(tmp_path)
  return tmp_path


def overwrite_two_bytes(path):
  with open(path, 'r+b') as f:
    f.seek(100)
    f.write(b'\xff\xff')


def test_sizes_and_checksums_are_those_of_the_files(folder):
  files = json.loads((folder / 'manifest.json').read_text())['files']
  assert files == {
      'params/d/a': {'size': 5120, 'sha256': hashlib.sha256(bytes(range(256)) * 20).hexdigest()},
      'config/metadata': {'size': 2, 'sha256': hashlib.sha256(b'{}').hexdigest()},
      # FIPS 180-4, the digest of no bytes
      'empty': {'size': 0, 'sha256': 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'},
  }


def test_an_untouched_folder_is_sound(folder):
  assert manifest.damage(folder) == ''


@pytest.mark.parametrize('harm, words', [
    (lambda f: overwrite_two_bytes(f / 'params/d/a'), 'params/d/a does not match its checksum'),
    (lambda f: os.truncate(f / 'params/d/a', 5119), 'params/d/a has 5119 bytes where 5120 were written'),
    (lambda f: os.truncate(f / 'params/d/a', 5121), 'params/d/a has 5121 bytes where 5120 were written'),
    (lambda f: (f / 'params/d/a').unlink(), 'params/d/a is missing'),
    (lambda f: (f / 'empty').unlink(), 'empty is missing'),
    (lambda f: (f / 'manifest.json').unlink(), 'manifest.json is missing'),
    (lambda f: os.truncate(f / 'manifest.json', 20), 'manifest.json is damaged'),
    (lambda f: os.truncate(f / 'manifest.json', 0), 'manifest.json is damaged'),
    (lambda f: (f / 'manifest.json').write_text('[]'), 'manifest.json is damaged'),
    (lambda f: (f / 'manifest.json').write_bytes(b'\xff\xfe\xfd'), 'manifest.json is damaged'),
])
def test_damage_is_named(folder, harm, words):
  harm(folder)
  assert manifest.damage(folder) == words


def test_an_edited_list_is_noticed(folder):
  path = folder / 'manifest.json'
  edited = json.loads(path.read_text())
  del edited['files']['params/d/a']
  path.write_text(json.dumps(edited))
  assert manifest.damage(folder) == 'manifest.json is damaged'


def test_checksums_are_only_read_where_asked(folder):
  overwrite_two_bytes(folder / 'params/d/a')
  assert manifest.damage(folder, under='config') == ''
  assert manifest.damage(folder, checksums=False) == ''
  assert manifest.damage(folder, under='params') == 'params/d/a does not match its checksum'


def test_sizes_are_compared_even_outside_the_subfolder_asked_for(folder):
  os.truncate(folder / 'params/d/a', 3)
  assert 'params/d/a has 3 bytes' in manifest.damage(folder, under='config')


def test_a_manifest_without_checksums_compares_sizes(folder):
  manifest.write(folder, checksums=False)
  overwrite_two_bytes(folder / 'params/d/a')
  assert manifest.damage(folder) == ''
  os.truncate(folder / 'params/d/a', 3)
  assert 'params/d/a has 3 bytes' in manifest.damage(folder)


def test_a_file_larger_than_one_read_is_hashed_whole(tmp_path):
  data = os.urandom((1 << 20) + 17)
  (tmp_path / 'big').write_bytes(data)
  manifest.write(tmp_path)
  assert json.loads((tmp_path / 'manifest.json').read_text())['files']['big']['sha256'] == hashlib.sha256(
      data).hexdigest()
