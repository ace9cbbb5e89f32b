"""Trains a language model; goes on by itself when the run folder holds a checkpoint.

  python experiments/pretrain.py --config=llama_130m --config.model.scheme=lns --workdir=runs/130m_lns

Exit codes: 0 done, 1 error (one sentence on stderr), 75 preempted and saved: run the same command again.
"""

from absl import flags

from lns_jax import cli, presets

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Run folder: checkpoints, metrics.jsonl, TensorBoard events.')
cli.define_xla_flags()
flags.mark_flags_as_required(['config', 'workdir'])


def main():
  config = presets.resolve(CONFIG.value)
  from lns_jax.train import loop  # jax comes last: --help and a mistyped flag answer at once
  return loop.train(config, WORKDIR.value)


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
