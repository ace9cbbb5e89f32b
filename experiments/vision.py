"""Trains a vision transformer; goes on by itself when the run folder holds a checkpoint.

  python experiments/vision.py --config=vit_tiny:digits --config.model.scheme=branch_lns --workdir=runs/digits

Everything else is as in pretrain.py. `--config.data.source` is digits (scikit-learn's), a .npz file with images and
labels, or a folder with the four files of MNIST or Fashion-MNIST.
"""

from absl import flags

from lns_jax import cli, presets
from lns_jax.errors import UserError

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Run folder: checkpoints, metrics.jsonl, TensorBoard events.')
cli.define_xla_flags()
flags.mark_flags_as_required(['config', 'workdir'])


def main():
  config = presets.resolve(CONFIG.value)
  if config.model.family != 'vit':
    raise UserError(f'vision.py trains models of images, and this config is of model.family = {config.model.family}; '
                    'use pretrain.py.')
  from lns_jax.train import loop
  return loop.train(config, WORKDIR.value)


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
