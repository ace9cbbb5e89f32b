"""Writes a tiny set in the layout of TFDS's C4: c4_like.py FOLDER JSON, the texts by split.

A program of its own, so that the tests read the set without its class, as users do.
"""

import json
import sys

import tensorflow_datasets as tfds


class C4(tfds.core.GeneratorBasedBuilder):
  """Named and versioned as the real one, with two of its fields."""

  VERSION = tfds.core.Version('3.1.0')
  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name='en')]

  def __init__(self, *, texts: dict[str, list[str]], **kwargs):
    self._texts = texts
    super().__init__(**kwargs)

  def _info(self):
    features = tfds.features.FeaturesDict({'text': tfds.features.Text(), 'url': tfds.features.Text()})
    return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

  def _split_generators(self, dl_manager):
    return {split: self._generate_examples(texts) for split, texts in self._texts.items()}

  def _generate_examples(self, texts):
    for key, text in enumerate(texts):
      yield key, {'text': text, 'url': f'u{key}'}


if __name__ == '__main__':
  builder = C4(texts=json.loads(sys.argv[2]), data_dir=sys.argv[1], config='en', file_format='array_record')
  builder.download_and_prepare()
