"""The rows of a run, whatever its model reads."""

from lns_jax.config import RunConfig
from lns_jax.data import images, pipeline, prepare
from lns_jax.errors import UserError


def open(config: RunConfig) -> pipeline.Dataset | images.Images:
  """Prepares and opens the rows that `config.data` names. Raises UserError when they are not usable."""
  if config.model.family == 'encoder':
    raise UserError('a model of family encoder is measured on text that it is given, and not trained here: there are '
                    'no rows of its own.')
  if config.model.family == 'vit':
    return images.open(config.data, config.model)
  return pipeline.open(prepare.prepare(config.data, config.model.vocab_size))
