"""The TFDS builder of the embedded corpus; apart, because importing it imports TFDS."""

import tensorflow_datasets as tfds


class LnsEmbedded(tfds.core.GeneratorBasedBuilder):
  """Standard library and documentation topics of one Python, as text records in a given order."""

  VERSION = tfds.core.Version('1.0.0')

  def __init__(self, *, splits: dict[str, tuple[tuple[str, bytes], ...]], **kwargs):
    self._documents = splits
    super().__init__(**kwargs)

  def _info(self):
    features = tfds.features.FeaturesDict({'text': tfds.features.Text(), 'name': tfds.features.Text()})
    return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

  def _split_generators(self, dl_manager):
    return {split: self._generate_examples(documents) for split, documents in self._documents.items()}

  def _generate_examples(self, documents):
    for key, (name, text) in enumerate(documents):
      yield key, {'text': text, 'name': name}
