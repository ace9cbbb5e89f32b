"""Loss, perplexity and bits per byte of a run's model on a split.

  python experiments/evaluate.py --workdir=runs/quickstart/lns [--split=validation] [--parity] [--quantise=int8]

--parity prints the authors' n / (n + 1) value beside the right one. --quantise=int8 evaluates the model with matrices
of 8 bits, and as it is on the same rows: the difference comes with its 95 % interval.
"""

from absl import flags

from lns_jax import cli, distributed

WORKDIR = flags.DEFINE_string('workdir', None, 'Run folder.')
SPLIT = flags.DEFINE_string('split', 'validation', 'Split of the corpus.')
STEP = flags.DEFINE_integer('step', None, 'Checkpoint; the newest sound one by default.', lower_bound=0)
MAX_TOKENS = flags.DEFINE_integer(
    'max_tokens', None, "Bound on the tokens, 0 for none; the run's own eval.max_tokens by default.", lower_bound=0)
PARITY = flags.DEFINE_bool('parity', False, "Also the value that the paper's code would report.")
QUANTISE = flags.DEFINE_enum('quantise', None, ['int8'], "Weights of the blocks' matrices; as saved by default.")
flags.DEFINE_alias('model', 'workdir')
flags.mark_flag_as_required('workdir')
distributed.define_flags()


def main():
  distributed.join()
  from lns_jax import runs
  return runs.evaluate(WORKDIR.value, split=SPLIT.value, step=STEP.value, max_tokens=MAX_TOKENS.value,
                       parity=PARITY.value, int8=QUANTISE.value == 'int8')


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
