"""A Hugging Face folder or a .gguf file as a run folder, to train on from it or to prune it.

  python experiments/import_hf.py --model=SmolLM2-135M --workdir=runs/smol
  python experiments/pretrain.py --config=runs/smol/config.py --config.data.source=my_text --workdir=runs/smol_mine
  python experiments/import_hf.py --model=Llama-3.2-1B --retrofit=lns --workdir=runs/llama_lns
  python experiments/import_hf.py --model=LNS_1B --scheme=lns --workdir=runs/lns_1b
  python experiments/import_hf.py --from_bin=old_checkpoint --out=as_safetensors

--retrofit=lns multiplies the gains of layer l by sqrt(l) and sets the scheme to lns: the model computes the same, and
training goes on with the fixed factor. --scheme=lns is for weights that were trained with the factor and do not say
so, such as those of the paper's code, whose config.json is a plain Llama's: the weights stay as they are.
--from_bin writes a folder of pickles (.bin) as safetensors; it needs torch, and reads tensors alone.
"""

from absl import flags

from lns_jax import cli
from lns_jax.errors import UserError

MODEL = flags.DEFINE_string('model', None, 'Hugging Face folder or .gguf file.')
WORKDIR = flags.DEFINE_string('workdir', None, 'Run folder to write, which must not exist.')
SCHEME = flags.DEFINE_string('scheme', None, 'Norm placement that the weights were trained with and do not say.')
RETROFIT = flags.DEFINE_string('retrofit', '', 'Scheme with fixed factors that a Pre-LN model is to have, such as lns.')
DTYPE = flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16', 'float16'], 'Type of the parameters; none: as stored.')
SEQ_LEN = flags.DEFINE_integer(
    'seq_len', 0, 'Positions of a row of text; 0: 512, or what the model is for.', lower_bound=0)
FROM_BIN = flags.DEFINE_string('from_bin', None, 'Folder with config.json and .bin files.')
OUT = flags.DEFINE_string('out', None, 'Folder for --from_bin, which must not exist.')


def main():
  asked = [bool(flag.value) for flag in (MODEL, WORKDIR, FROM_BIN, OUT)]
  if asked not in ([True, True, False, False], [False, False, True, True]):
    raise UserError('give --model and --workdir, or --from_bin and --out.')
  if FROM_BIN.value:
    from lns_jax.interop import from_bin
    return from_bin.convert(FROM_BIN.value, OUT.value)
  from lns_jax.interop import import_model
  return import_model.import_model(MODEL.value, WORKDIR.value, scheme=SCHEME.value, retrofit=RETROFIT.value,
                              dtype=DTYPE.value, seq_len=SEQ_LEN.value)


def launch():
  """Entry point."""
  cli.run(main, interrupted='the folder is there whole or not at all, and the same command starts from the beginning')


if __name__ == '__main__':
  launch()
