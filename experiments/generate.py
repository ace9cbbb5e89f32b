"""Text that a model writes on from a prompt.

  python experiments/generate.py --model=runs/quickstart/lns --prompt='The function returns'
  python experiments/generate.py --model=model.gguf --prompts=questions.txt --temperature=0.7 --top_p=0.9 --max_new=64
  echo 'Once upon a time' | python experiments/generate.py --model=DIR --prompts=-

The new text goes to stdout as it comes, that of several prompts one after the other, each with a newline behind it; the
last line of stdout is one JSON object with 'texts', the continuations, and the counts and times. --prompts reads one
prompt a line, of a file or (-) of stdin. The same --seed gives a prompt the same text, whatever --batch_size is.
"""

import pathlib
import sys

from absl import flags

from lns_jax import cli
from lns_jax.errors import UserError

MODEL = flags.DEFINE_string('model', None, 'Run folder, Hugging Face folder or .gguf file.')
PROMPT = flags.DEFINE_multi_string('prompt', [], 'A text to continue; may be given several times.')
PROMPTS = flags.DEFINE_string('prompts', '', 'File of prompts, one a line; - reads stdin.')
MAX_NEW = flags.DEFINE_integer('max_new', 128, 'New tokens of each text at most.', lower_bound=0)
TEMPERATURE = flags.DEFINE_float(
    'temperature', 0.0, 'Logits are divided by it; 0: always the likeliest token.', lower_bound=0.0)
TOP_P = flags.DEFINE_float(
    'top_p', 1.0, 'Draws from the likeliest tokens that together have this probability.', lower_bound=0.0,
    upper_bound=1.0)
TOP_K = flags.DEFINE_integer('top_k', 0, 'Draws from that many likeliest tokens; 0: all.', lower_bound=0)
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the draws.', lower_bound=0, upper_bound=2**32 - 1)
STOP = flags.DEFINE_multi_string('stop', [], 'A string that ends a text; may be given several times.')
BATCH_SIZE = flags.DEFINE_integer('batch_size', 8, 'Prompts continued at a time.', lower_bound=1)
DTYPE = flags.DEFINE_enum('dtype', '', ['', 'float32', 'bfloat16', 'float64'], "Precision; the model's own by default.")
STEP = flags.DEFINE_integer('step', None, 'Checkpoint of a run; the newest sound one by default.', lower_bound=0)
flags.mark_flags_as_required(['model'])


def prompts() -> list[str]:
  """The texts of both flags."""
  texts = list(PROMPT.value)
  if PROMPTS.value:
    try:
      lines = sys.stdin.buffer.read() if PROMPTS.value == '-' else pathlib.Path(PROMPTS.value).expanduser().read_bytes()
      texts += lines.decode('utf-8').splitlines()
    except OSError as e:
      raise UserError(f'--prompts={PROMPTS.value} cannot be read: {e.strerror or e}.') from None
    except UnicodeDecodeError:
      raise UserError(f'--prompts={PROMPTS.value} is not text in UTF-8.') from None
  if not texts:
    raise UserError('there is no prompt; give --prompt=TEXT, or --prompts=FILE with one a line.')
  return texts


def show(text: str):
  """Writes to stdout what its encoding has no character for as an escape."""
  encoding = sys.stdout.encoding or 'utf-8'
  sys.stdout.write(text.encode(encoding, 'backslashreplace').decode(encoding))
  sys.stdout.flush()


def main():
  texts = prompts()
  if '' in STOP.value:
    raise UserError('--stop= is empty, and every text holds that; give the string that ends one.')
  from lns_jax.interop import writing
  return writing.write(
      MODEL.value, texts, max_new=MAX_NEW.value, temperature=TEMPERATURE.value, top_p=TOP_P.value, top_k=TOP_K.value,
      seed=SEED.value, stops=STOP.value, dtype=DTYPE.value, batch_size=BATCH_SIZE.value, step=STEP.value, show=show)


def launch():
  """Entry point."""
  cli.run(main, interrupted='nothing is kept')


if __name__ == '__main__':
  launch()
