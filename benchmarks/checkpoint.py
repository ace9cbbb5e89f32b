"""What a checkpoint costs: Orbax's save and commit, and our manifest of sizes and checksums.

  python benchmarks/checkpoint.py [--megabytes=256] [--rounds=5] [--folder=DIR]

Prints the median seconds of each part over the rounds, on incompressible arrays, as one JSON line.
"""

import statistics
import tempfile
import time

from absl import flags

from lns_jax import cli

MEGABYTES = flags.DEFINE_integer('megabytes', 256, 'Size of the saved arrays.', lower_bound=1)
ROUNDS = flags.DEFINE_integer('rounds', 5, 'Saves.', lower_bound=1)
FOLDER = flags.DEFINE_string('folder', None, 'Where to write; a temporary folder by default.')


def measure(folder: str, arrays) -> dict[str, float]:
  """Seconds of one save: blocking call, commit in the background, manifest, and both checks."""
  import orbax.checkpoint as ocp
  from etils import epath
  from lns_jax.train import manifest
  step = epath.Path(folder) / '1'
  marks = [time.perf_counter()]
  def lap() -> float:
    marks.append(time.perf_counter())
    return marks[-1] - marks[-2]
  with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler()) as saver:
    saver.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(arrays)))
    blocking = lap()
    saver.wait_until_finished()
    commit = lap()
  lap()
  manifest.write(step)
  found = {'blocking': blocking, 'commit': commit, 'manifest': lap()}
  assert not manifest.damage(step, checksums=False)
  found['check_sizes'] = lap()
  assert not manifest.damage(step)
  return found | {'check_checksums': lap()}


def main():
  import jax.numpy as jnp
  import numpy as np
  rng = np.random.default_rng(0)
  arrays = {str(i): jnp.asarray(rng.standard_normal(MEGABYTES.value * 2**16, np.float32)) for i in range(4)}
  rounds = []
  for _ in range(ROUNDS.value):
    with tempfile.TemporaryDirectory(dir=FOLDER.value) as folder:
      rounds.append(measure(folder, arrays))
  return {'megabytes': MEGABYTES.value, **{k: statistics.median(r[k] for r in rounds) for k in rounds[0]}}


if __name__ == '__main__':
  cli.run(main)
