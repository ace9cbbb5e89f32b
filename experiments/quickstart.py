"""Trains Pre-LN and LNS twins on the text that every Python carries, and shows what their depth does.

  python experiments/quickstart.py [--workdir=D] [--budget=full or tiny]

Needs no download and no accelerator. Leaves D/pre and D/lns (ordinary run folders), D/summary.json and
D/report.html. Run it again after an interruption: it goes on.
"""

from absl import flags

from lns_jax import cli, presets

WORKDIR = flags.DEFINE_string('workdir', 'runs/quickstart', 'Folder for both runs, summary.json and report.html.')
BUDGET = flags.DEFINE_enum('budget', 'full', ('full', 'tiny'), 'full: minutes; tiny: a smoke test.')
SAMPLE = {'full': 12_288, 'tiny': 1_024}


def main():
  config = presets.load_config(f'quickstart:{BUDGET.value}')
  from lns_jax import twins
  summary = twins.compare(config, WORKDIR.value, ('pre', 'lns'), SAMPLE[BUDGET.value])
  print(twins.table(summary))
  return {'report': f'{WORKDIR.value}/report.html', 'seconds': summary['seconds'],
          **{f'{scheme}_{key}': found[key] for scheme, found in summary['schemes'].items()
             for key in ('val_loss', 'val_perplexity', 'diverged')}}


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
