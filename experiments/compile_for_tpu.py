"""Compiles a run's steps for a TPU pod on any CPU: whether they fit, what they cost. Nothing is run, no data are read.

  python experiments/compile_for_tpu.py --config=llama_130m --topology=v5e:4x4 --config.model.loop=scan

Needs libtpu: pip install 'lns_jax[tpu]'. When the run does not fit, settings that take less memory are compiled until
one fits, and named.
"""

from absl import flags

from lns_jax import cli, presets

CONFIG = cli.define_config()
TOPOLOGY = flags.DEFINE_string(
    'topology', None, 'One slice: v4:2x2x4, v5e:4x4, v5p:4x4x4, v6e:16x16, v7x:2x2x1 and the like.')
SLICES = flags.DEFINE_integer('slices', 0, 'Slices of a pod; 0: as --config.mesh.slices says.', lower_bound=0)
EVAL = flags.DEFINE_boolean('eval', True, 'Whether to compile the evaluation step too.')
SUGGEST = flags.DEFINE_boolean('suggest', True, 'Whether to look for settings that fit when these do not.')
cli.define_xla_flags()
flags.mark_flags_as_required(['config', 'topology'])


def main():
  config = presets.resolve(CONFIG.value)
  from lns_jax import host
  from lns_jax.train import chips
  chips.parse(TOPOLOGY.value)
  host.compile_for_tpu()
  from lns_jax.aot import compile_tpu
  return compile_tpu.compile_for(config, TOPOLOGY.value, slices=SLICES.value, with_eval=EVAL.value,
                                 suggest=SUGGEST.value)


def launch():
  """Entry point."""
  cli.run(main, interrupted='nothing was written')


if __name__ == '__main__':
  launch()
