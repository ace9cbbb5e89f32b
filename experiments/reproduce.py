"""One table or figure of the paper: numbers, plot and page in --workdir.

  python experiments/reproduce.py --item=schemes --scale=cpu --workdir=runs/schemes

Items: schemes, every norm placement trained alike, each at its own best learning rate and compared with pre in pairs
of seeds. Scales: cpu, the quickstart's budget (hours on 2 cores); tiny, a smoke test; tpu, LLaMA-130M on C4, which
--data_dir (TFDS) or --data_source (made by prepare_data.py) point to. Run it again after an interruption: it goes on.
Speed that was measured with other settings, code or libraries or on another machine is measured again. To measure it
anew, remove WORKDIR/speed and add --only=speed.
"""

from absl import flags

from lns_jax import cli
from lns_jax.reproduce import items

ITEM = flags.DEFINE_string('item', None, f'What to reproduce: {", ".join(items.ITEMS)}.', required=True)
SCALE = flags.DEFINE_string('scale', 'cpu', 'cpu, tiny or tpu.')
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for runs, numbers, plot and page.', required=True)
SCHEMES = flags.DEFINE_list('schemes', None, 'Rows to run besides pre; all by default. Known results of others stay.')
JOBS = flags.DEFINE_integer('jobs', 1, 'Runs at a time, each on its share of the processors.', lower_bound=1)
ONLY = flags.DEFINE_enum('only', 'all', ('all', 'train', 'speed'), 'train, speed (best on an idle machine), or both.')
DATA_DIR = flags.DEFINE_string('data_dir', None, "TFDS data_dir, in place of the config's.")
DATA_SOURCE = flags.DEFINE_string('data_source', None, "Text or a prepared folder, in place of the config's.")


def main():
  data = {k: v for k, v in (('data_dir', DATA_DIR.value), ('source', DATA_SOURCE.value)) if v}
  return items.reproduce(ITEM.value, SCALE.value, WORKDIR.value, names=SCHEMES.value, jobs=JOBS.value, only=ONLY.value,
                         data=data)


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
