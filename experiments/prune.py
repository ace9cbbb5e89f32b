"""A run's model without some of its layers, as a run folder that the other commands open.

  python experiments/prune.py --model=runs/quickstart/pre --drop_layers=7,12 --out=runs/pruned
  python experiments/prune.py --model=runs/quickstart/pre --most_rise=0.01 --out=runs/pruned

--most_rise=0.01 removes one layer after another, always the one that costs least on a sample of the validation split,
as long as the loss there rises by less than 1 %. Every layer that is left keeps its own index. To train the result on:
pretrain.py --config.train.init_from=runs/pruned with a --workdir of its own.
"""

from absl import flags

from lns_jax import cli

MODEL = flags.DEFINE_string('model', None, 'Run folder.')
OUT = flags.DEFINE_string('out', None, 'Folder for the pruned model, which must not exist.')
DROP_LAYERS = flags.DEFINE_list('drop_layers', [], 'Layers to remove: 1-based, separated by commas.')
MOST_RISE = flags.DEFINE_float(
    'most_rise', None, 'Remove the cheapest layers while the loss rises by less than this share.', lower_bound=0.0)
TOKENS = flags.DEFINE_integer(
    'tokens', 65_536, 'Size of the sample for --most_rise, in tokens or images; 0: all that is evaluated.',
    lower_bound=0)
flags.mark_flags_as_required(['model', 'out'])


def main():
  ids = cli.integers('drop_layers', DROP_LAYERS.value)
  from lns_jax import surgery
  return surgery.prune(MODEL.value, OUT.value, drop_layers=ids, most_rise=MOST_RISE.value, tokens=TOKENS.value)


def launch():
  """Entry point."""
  cli.run(main, interrupted='--out is there whole or not at all, and the same command starts from the beginning')


if __name__ == '__main__':
  launch()
