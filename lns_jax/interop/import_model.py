"""A model that others have stored, as a run folder, which every command opens and training goes on from."""

import dataclasses
import tempfile
import time

import jax

from lns_jax import config as config_lib
from lns_jax import files
from lns_jax.config import ModelConfig, RunConfig
from lns_jax.data import dataset, tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import fold, load, save
from lns_jax.interop.text_rules import SEQ_LEN


def import_model(model, workdir, *, scheme: str | None = None, retrofit: str = '', dtype: str | None = None,
                 seq_len: int = 0) -> dict:
  """Writes the run folder `workdir` with the model at `model`.

  Args:
    model: Hugging Face folder or .gguf file.
    workdir: folder that does not exist yet.
    scheme: norm placement that the weights were trained with, where they do not say; see `load`.
    retrofit: a scheme with fixed factors, such as lns: the weights are divided by its factors, so that the function
      stays and training goes on with them; see `fold.retrofit`.
    dtype: that the parameters are cast to.
    seq_len: positions of a row of text; 0: the shorter of 512 and what the model is for.

  Returns:
    {'workdir', 'model', 'scheme', 'layers', 'params', 'dtype', 'tokenizer' (its name or None), 'seconds'}.

  Raises:
    UserError: there is no such model or it is not understood, `workdir` exists, or the retrofit has no such form.
  """
  start = time.perf_counter()
  out = files.unused(workdir)
  if load.is_run(model):
    raise UserError(f'{model} is a run folder already; the commands open it as it is.')
  config, params, tokenizer = load.load(model, scheme=scheme, dtype=dtype)
  if retrofit:
    config, params = fold.retrofit(config, params, retrofit)
  run = _settings(config, tokenizer, seq_len)
  origin = {'path': str(files.absolute(model)), 'retrofit': retrofit or None, 'removed_layers': []}
  corpus_hash = None
  if config.reads_text:  # also where there is none: training on asks for one then
    run = config_lib.changed(run, {'data': {'tokenizer': str(out / 'tokenizer')}})
  if tokenizer is not None and config.family == 'decoder':  # an encoder has no rows of its own
    corpus_hash = _corpus_hash(run, tokenizer)
  save.write(out, run, params, step=0, origin=origin, corpus_hash=corpus_hash,
             tokenizer=None if tokenizer is None else tokenizer.save)
  leaves = jax.tree.leaves(params)
  return {'workdir': str(out), 'model': str(model), 'scheme': config.scheme, 'layers': config.num_layers,
          'params': sum(x.size for x in leaves), 'dtype': str(leaves[0].dtype),
          'tokenizer': tokenizer and tokenizer.name, 'seconds': time.perf_counter() - start}


def _settings(config: ModelConfig, tokenizer, seq_len: int) -> RunConfig:
  """A run that goes on from the model gently; all of it is for the user to change."""
  longest = config.max_positions or SEQ_LEN
  if config.family != 'vit' and seq_len > longest:
    raise UserError(f'--seq_len={seq_len} is longer than the {longest} positions that the model is for.')
  groups = {'optimizer': {'name': 'adamw', 'lr': 2e-5, 'warmup_steps': 100, 'clip_norm': 1.0},
            'train': {'batch_size': 8}}
  if config.reads_text:
    groups['data'] = {'seq_len': seq_len or min(SEQ_LEN, longest)}
  if config.family == 'decoder':
    groups['data']['add_bos'] = tokenizer is None or tokenizer.adds_bos
  return config_lib.changed(dataclasses.replace(RunConfig(), model=config), groups)


def _corpus_hash(run: RunConfig, tokenizer: tokenizers.Tokenizer) -> str:
  """Of the embedded text as this tokenizer has it."""
  with tempfile.TemporaryDirectory() as folder:
    tokenizer.save(folder)
    return dataset.open(config_lib.changed(run, {'data': {'tokenizer': folder}})).hash
