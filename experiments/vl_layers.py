"""What the layers of a Qwen2.5-VL do for questions about pictures: the accuracy without each layer of either tower.

  python experiments/vl_layers.py --model=Qwen2.5-VL-7B-Instruct --items=mmmu/validation.jsonl --out=runs/vl_layers

--model is a Hugging Face folder with its tokenizer; --items has one question a line, pictures by paths relative to it:
{"question": "What is <image 1>?", "options": ["a cat", "a dog"], "answer": "B", "images": ["cat.png"]}. Leaves
vl_layers.json, vision.svg and text.svg (paper appendix C, figure 10) in --out, and items.jsonl, one line a question:
the same command goes on behind the last.
"""

from absl import flags

from lns_jax import cli

MODEL = flags.DEFINE_string('model', None, 'Hugging Face folder of a Qwen2.5-VL.')
ITEMS = flags.DEFINE_string('items', None, 'JSONL file of questions.')
OUT = flags.DEFINE_string('out', None, 'Folder for the results.')
LIMIT = flags.DEFINE_integer('limit', 0, 'Number of questions, the first ones; 0: all.', lower_bound=0)
MAX_PIXELS = flags.DEFINE_integer(
    'max_pixels', 0, "Bound on the pixels of a picture, which decides what a question costs; 0: the model's own.",
    lower_bound=0)
DTYPE = flags.DEFINE_enum('dtype', '', ['', 'float32', 'bfloat16'],
                          'Type of weights and compute; float32 on a CPU and bfloat16 elsewhere by default.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the bootstrap.', lower_bound=0)
flags.mark_flags_as_required(['model', 'items', 'out'])


def main():
  from lns_jax import vl_layers
  return vl_layers.measure(MODEL.value, ITEMS.value, OUT.value, limit=LIMIT.value, max_pixels=MAX_PIXELS.value,
                           dtype=DTYPE.value, seed=SEED.value)


def launch():
  """Entry point."""
  cli.run(main)


if __name__ == '__main__':
  launch()
