"""A model on the tasks of EleutherAI's lm-eval, whose data lie on this machine: nothing is downloaded.

  python experiments/evaluate_tasks.py --model=runs/quickstart/lns --tasks=mmlu_dev
  python experiments/evaluate_tasks.py --model=models/SmolLM2-135M --tasks=paper --data_dir=data/sets
  python experiments/evaluate_tasks.py --model=models/SmolLM2-135M --tasks=questions.jsonl,mine --include_path=my_tasks
  python experiments/evaluate_tasks.py --model=models/bert-squad --squad=data/dev-v1.1.json

--tasks=mmlu_dev (the letter of the answer) and mmlu_dev_texts (its words) are 281 questions of MMLU's development set,
which come with lm-eval. Copies of other sets lie in --data_dir under the name of the task, or as they lie on the
Hugging Face Hub: boolq/validation.jsonl or aps/super_glue/boolq/validation-*.parquet.
"""

import pathlib
import sys

from absl import flags

from lns_jax import cli

MODEL = flags.DEFINE_string('model', None, 'Run folder, Hugging Face folder or .gguf file.')
TASKS = flags.DEFINE_list(
    'tasks', [], 'Names that lm-eval knows; paper: MMLU, BoolQ, ARC-e, PIQA, HellaSwag, OBQA and WinoGrande; mmlu_dev; '
    'mmlu_dev_texts; a .jsonl file of questions as of diagnose.py --task.')
SQUAD = flags.DEFINE_string('squad', '', 'File of the SQuAD v1.1 form, for a BERT with a head for it; in place of tasks.')
INCLUDE_PATH = flags.DEFINE_string('include_path', '', 'Folder with YAML files of further tasks.')
DATA_DIR = flags.DEFINE_string('data_dir', '', 'Folder with copies of the data sets.')
NUM_FEWSHOT = flags.DEFINE_integer(
    'num_fewshot', None, 'Examples before each question; as each task says by default.', lower_bound=0)
LIMIT = flags.DEFINE_integer('limit', None, 'Questions of each task; all by default.', lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer('batch_size', 0, 'Rows of a batch; 0: as fits, by length.', lower_bound=0)
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the examples and of generation.', lower_bound=0)
DTYPE = flags.DEFINE_enum('dtype', '', ['', 'float32', 'bfloat16', 'float64'], "Precision; the model's own by default.")
SCHEME = flags.DEFINE_string('scheme', '', 'Norm placement of weights that do not say theirs.')
ADD_BOS = flags.DEFINE_bool('add_bos', None, 'Whether texts start with BOS; as the tokenizer says by default.')
MAX_LENGTH = flags.DEFINE_integer(
    'max_length', 0, 'Tokens that the model reads at most; 0: as many as it was trained with.', lower_bound=0)
flags.mark_flag_as_required('model')


def main():
  # Python looks into a script's folder first, and evaluate.py there is not the library that lm-eval's tasks import.
  here = pathlib.Path(__file__).resolve().parent
  sys.path[:] = [folder for folder in sys.path if pathlib.Path(folder).resolve() != here]
  from lns_jax.errors import UserError
  from lns_jax.interop import evaluation
  if bool(TASKS.value) == bool(SQUAD.value):
    raise UserError('give one of --tasks, for a model that continues text (paper, mmlu_dev, ...), and --squad, for an '
                    'encoder with a head for it.')
  if SQUAD.value:
    return evaluation.squad(MODEL.value, SQUAD.value, batch_size=BATCH_SIZE.value, dtype=DTYPE.value, limit=LIMIT.value)
  return evaluation.evaluate(
      MODEL.value, TASKS.value, include_path=INCLUDE_PATH.value, data_dir=DATA_DIR.value,
      num_fewshot=NUM_FEWSHOT.value, limit=LIMIT.value, batch_size=BATCH_SIZE.value, seed=SEED.value,
      dtype=DTYPE.value, scheme=SCHEME.value, add_bos=ADD_BOS.value, max_length=MAX_LENGTH.value)


def launch():
  """Entry point."""
  cli.run(main, interrupted='nothing was written, and the same command starts from the beginning')


if __name__ == '__main__':
  launch()
