"""A Hugging Face folder, such as export_hf.py leaves, as one GGUF file for llama.cpp and its like.

  python experiments/export_hf.py --workdir=runs/lns --out=exported
  python experiments/export_gguf.py --model=exported --out=lns.gguf --dtype=q8_0

The file is opened again and every tensor, setting and the tokenizer compared before it is there.
"""

from absl import flags

from lns_jax import cli

MODEL = flags.DEFINE_string('model', None, 'Hugging Face folder or .gguf file of the model.')
OUT = flags.DEFINE_string('out', None, 'The .gguf file, which must not exist.')
DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'float16', 'bfloat16', 'q8_0'], 'Type of the matrices.')
flags.mark_flags_as_required(['model', 'out'])


def main():
  from lns_jax.interop import gguf_write
  return gguf_write.write(MODEL.value, OUT.value, dtype=DTYPE.value)


def launch():
  """Entry point."""
  cli.run(main, interrupted='--out is there whole or not at all, and the same command starts from the beginning')


if __name__ == '__main__':
  launch()
