"""Depth report of one model or more: what each layer does, what it costs to lose it, as numbers, plots and one page.

  python experiments/diagnose.py --model=runs/quickstart/pre,runs/quickstart/lns --out=runs/depth

Leaves depth.json, the arrays of every measure, plots/ and report.html in --out. The same command goes on where it was
stopped: a measure that is done is not taken again.
"""

from absl import flags

from lns_jax import cli

MODEL = flags.DEFINE_list(
    'model', None, 'Run folders, Hugging Face folders or .gguf files, separated by commas.')
OUT = flags.DEFINE_string('out', None, 'Folder for the results.')
TEXT = flags.DEFINE_string(
    'text', '', "File or folder of text, embedded, or tfds:NAME; a run's own validation split by default.")
TOKENS = flags.DEFINE_integer(
    'tokens', 262_144, 'Size of the sample in tokens (of images: their number).', lower_bound=1)
SEQ_LEN = flags.DEFINE_integer('seq_len', 0, "Positions in a row; 0: the model's own.", lower_bound=0)
MEASURES = flags.DEFINE_list('measures', [], 'Which measures to take; by default all that are not only taken when they are '
                             'named, as tsne is (all,tsne takes both). A wrong name lists them.')
TASK = flags.DEFINE_string(
    'task', '', "accuracy (next token, or a ViT's class), or a JSONL file of multiple-choice questions, one a line: "
    '{"context": "...", "choices": ["...", "..."], "answer": 0}. Adds the removals by task accuracy; none by default.')
DTYPE = flags.DEFINE_enum('dtype', '', ['', 'float32', 'bfloat16', 'float64'], "Precision; the run's own by default.")
ANGLES = flags.DEFINE_enum(
    'angles', 'raw', ['raw', 'percentile'],
    "Heat maps of angular distances: as they are, or each row stretched between its percentiles as in the paper's code.")
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the bootstrap and of noise.', lower_bound=0)
flags.mark_flags_as_required(['model', 'out'])


def main():
  from lns_jax import diagnose
  return diagnose.diagnose(MODEL.value, OUT.value, text=TEXT.value, tokens=TOKENS.value, seq_len=SEQ_LEN.value,
                           chosen=MEASURES.value, task=TASK.value, dtype=DTYPE.value, seed=SEED.value,
                           angles=ANGLES.value)


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
