"""Paired table of finished run folders.

  python experiments/compare.py runs/quickstart/pre runs/quickstart/lns

Runs are compared with the first one, pairwise by seed. Runs on different corpora are refused.
"""

from absl import flags

from lns_jax import cli

ALLOW = flags.DEFINE_bool('allow_different_corpora', False, 'Print runs on different corpora all the same.')


def main(workdirs):
  from lns_jax import runs
  compared = runs.compare(workdirs, allow_different_corpora=ALLOW.value)
  print(runs.table(compared))
  return compared


def launch():
  """Entry point."""
  cli.run(main, arguments='run folders')


if __name__ == '__main__':
  launch()
