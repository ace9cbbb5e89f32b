"""A model as a Hugging Face folder that stock Llama, Qwen2, Qwen3, Mistral, OLMo, OLMo 2, GPT-2, BERT or ViT opens.

  python experiments/export_hf.py --workdir=runs/quickstart/lns --out=exported
  python experiments/export_hf.py --workdir=runs/lns_1b --out=exported --drop_layers=21,22 --dtype=bfloat16

LayerNorm Scaling's factors go into the weights, in float32, and config.json says so; lns_jax.load takes them out again.
The folder is opened again and its logits compared before it is there; a model that no stock class computes is refused.
"""

from absl import flags

from lns_jax import cli

WORKDIR = flags.DEFINE_string('workdir', None, 'Run folder, Hugging Face folder or .gguf file of the model.')
OUT = flags.DEFINE_string('out', None, 'Folder for the export, which must not exist.')
DROP_LAYERS = flags.DEFINE_list('drop_layers', [], 'Layers to leave out: 1-based, separated by commas.')
DTYPE = flags.DEFINE_string('dtype', 'float32', 'Type of the tensors: float32, bfloat16 or float16.')
SHARD_SIZE = flags.DEFINE_string('shard_size', '5GB', 'Largest size of a file.')
STEP = flags.DEFINE_integer('step', None, 'Checkpoint of a run; the newest sound one by default.', lower_bound=0)
MODEL_TYPE = flags.DEFINE_string('model_type', '', 'Class to export to, where several would do, such as mistral.')
flags.DEFINE_alias('model', 'workdir')
flags.mark_flags_as_required(['workdir', 'out'])


def main():
  ids = cli.integers('drop_layers', DROP_LAYERS.value)
  from lns_jax.interop import export
  return export.export(WORKDIR.value, OUT.value, drop_layers=ids, dtype=DTYPE.value, shard_size=SHARD_SIZE.value,
                       step=STEP.value, model_type=MODEL_TYPE.value)


def launch():
  """Entry point."""
  cli.run(main, interrupted='--out is there whole or not at all, and the same command starts from the beginning')


if __name__ == '__main__':
  launch()
