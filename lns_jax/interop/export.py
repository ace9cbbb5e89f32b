"""A model of ours as a Hugging Face folder that stock classes open, checked by its logits before it is there."""

import dataclasses
import functools
import pathlib
import shutil
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import config as config_lib
from lns_jax import files, remote
from lns_jax.data import tokenizers
from lns_jax.errors import UserError, nearest
from lns_jax.interop import card, config_json, families, fields, fold, names, shards, tokenizer_files
from lns_jax.interop.load import is_run, load, load_run_config
from lns_jax.interop.text_rules import LENGTH
from lns_jax.models import by_layer, layout, transformer
from lns_jax.train import run_info

AUTO = {'decoder': 'AutoModelForCausalLM', 'vit': 'AutoModelForImageClassification'}
DTYPES = ('float32', 'bfloat16', 'float16')
CLOSE = 1e-5  # of the largest logit, in float32
ROWS, T = 4, 128  # of the batch that is compared
# Settings that say how a model was made or is run, and names of layers; a stock class computes the same without them.
UNSAID = ('init', 'init_std', 'dyt_alpha', *config_lib.EXECUTION, 'layer_ids', 'depth', *fold.EXPONENTS)


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where a model came from. run: settings of the run that trained it, if one did; hf: its config.json, if any."""

  path: pathlib.Path
  step: int | None = None
  run: config_lib.RunConfig | None = None
  hf: dict = dataclasses.field(default_factory=dict)


def export(model, out, *, drop_layers=(), dtype: str = 'float32', shard_size: str = '5GB', step: int | None = None,
           model_type: str = '') -> dict:
  """Writes the folder `out`: config.json, safetensors, tokenizer, generation_config.json, README.md.

  Factors of the model's scheme are multiplied into its weights, see `fold`; the record of it is the field 'lns_jax' of
  config.json. The folder is read again and compared with the model; it is there only if their logits agree.

  Args:
    model: run folder, or whatever `load` opens.
    out: folder that does not exist yet.
    drop_layers: 1-based ids of layers to leave out; the others keep their own factors.
    dtype: of the tensors: float32, bfloat16 or float16.
    shard_size: largest size of a file, such as 5GB.
    step: checkpoint of a run; the newest sound one by default.
    model_type: Hugging Face's, where several could be; by default that of the model's own folder, or the first.

  Returns:
    {'out', 'model_type', 'scheme', 'layer_ids', 'files', 'tensors', 'bytes', 'dtype', 'check': {'tokens' compared,
    'largest' logit of the model, 'folded' and 'read_again': differences of the plain model and of the folder from what
    they should be, by that (both at most 1e-5), 'difference' of a logit from the float32 model, 'kl' from it at one
    token, in nats}, 'seconds'}.

  Raises:
    UserError: before anything is written for an `out` that exists, layers that are not there, a scheme or setting that
      no stock class computes; and when the logits differ. Nothing is left then.
  """
  start = time.perf_counter()
  out, limit = files.unused(out), shards.size(shard_size)
  if dtype not in DTYPES:
    raise UserError(f'--dtype={dtype} is not known.{nearest(dtype, DTYPES)}')
  model = remote.local(model)
  origin = _origin(model, step)
  config, params, tokenizer = load(model, step=origin.step)
  if drop_layers:
    config, params = transformer.remove_layers(config, params, drop_layers)
  plain, folded, record = fold.fold(config, params)
  plain = _with_length(plain, origin)
  chosen = pick(plain, model_type or origin.hf.get('model_type', ''), asked=bool(model_type))
  record |= {'origin': {'name': origin.path.name, 'step': origin.step}, 'dtype': dtype,
             'lns_jax': run_info.version('lns_jax')}
  batch = _batch(plain, tokenizer)
  try:
    with files.whole_folder(out) as folder:
      written = _write(folder, out.name, origin, chosen, plain, folded, record, tokenizer, jnp.dtype(dtype), limit)
      check = _check(folder, batch, (config, params), (plain, folded), jnp.dtype(dtype))
  except OSError as e:
    raise UserError(f'{out} could not be written: {e.strerror or e}; nothing is left of it.') from None
  return {'out': str(out), 'model_type': chosen, 'scheme': config.scheme, 'layer_ids': list(config.layer_ids),
          **written, 'dtype': dtype, 'check': check, 'seconds': time.perf_counter() - start}


def _origin(model, step: int | None) -> Origin:
  path = files.absolute(model)
  if is_run(path):
    step, run = load_run_config(path, step)
    return Origin(path, step, run)
  config = path / 'config.json'
  return Origin(path, step, hf=files.read_json(config) if config.is_file() else {})


def _with_length(plain: config_lib.ModelConfig, origin: Origin) -> config_lib.ModelConfig:
  """The model with the longest text that it is for, which its config.json must say: a run's rows, if nothing else."""
  if plain.family != 'decoder' or plain.max_positions:
    return plain
  return dataclasses.replace(plain, max_positions=origin.run.data.seq_len if origin.run else LENGTH)


def pick(plain: config_lib.ModelConfig, model_type: str = '', asked: bool = False) -> str:
  """The model_type whose class computes what a plain model does.

  model_type: the one to prefer, or, if `asked`, the only one.

  Raises:
    UserError: none does; the sentence names the settings that the nearest lacks.
  """
  if asked and model_type not in families.FAMILIES:
    raise UserError(f'--model_type={model_type} is not known.{nearest(model_type, families.FAMILIES)}')
  if asked:
    families.FAMILIES[model_type].theirs(plain)
  order = [model_type] if asked else sorted(families.FAMILIES, key=lambda name: name != model_type)
  lacking = {name: _lacking(plain, name) for name in order}
  kind = {'family', 'scheme', 'norm', 'positions'}  # what makes two classes far from each other
  best = min(order, key=lambda name: (len(kind & lacking[name].keys()), len(lacking[name])))
  if not lacking[best]:
    return best
  has = ' and '.join(f'model.{name} = {theirs!r} where this model has {ours!r}'
                     for name, (ours, theirs) in lacking[best].items())
  raise UserError(f"{f'--model_type={model_type}' if asked else 'no stock class'} cannot compute this model: "
                  f"{'it' if asked else f'the nearest, {best},'} has {has}.")


def _lacking(plain: config_lib.ModelConfig, model_type: str) -> dict:
  """{setting: (its value, what a class would make of it)}, as its config.json reads."""
  try:
    values = {**families.FAMILIES[model_type].theirs(plain), 'model_type': model_type}
    read = _said(config_lib.ModelConfig(**families.of(values, 'config.json')[1]))
  except UserError:  # of a class that has nothing in common with the model
    read = {}
  ours = _said(plain)
  return {name: (ours[name], read.get(name)) for name in ours if name not in read or ours[name] != read[name]}


def _said(config: config_lib.ModelConfig) -> dict:
  """What a model computes: its settings without those that do not matter, layers by position."""
  windows = tuple(i for i, l in enumerate(config.layer_ids, 1) if config.window(l))
  window = config.sliding_window if windows else 0
  values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
            if f.name not in UNSAID and not f.metadata.get('scheme')}
  scaling = config.rope_scaling
  if scaling.kind == 'linear':  # which does not read it
    values['rope_scaling'] = dataclasses.replace(scaling, original_length=0)
  return values | {'sliding_window': window, 'window_layers': windows if len(windows) < config.num_layers else ()}


def _write(folder, name: str, origin: Origin, model_type: str, plain, params, record: dict, tokenizer, dtype,
           limit: int) -> dict:
  """Every file of the export. Returns {'files', 'tensors', 'bytes'}."""
  family = families.FAMILIES[model_type]
  shapes, get = _tensors(plain, params, family, dtype)
  written = shards.write(folder, shapes, get, dtype, limit)
  ids = tokenizer_files.write(folder, origin.path, origin.hf, tokenizer, origin.run)
  files.write_json(folder / 'config.json', {
      'architectures': [family.architecture], 'model_type': model_type, 'torch_dtype': dtype.name,
      **family.theirs(plain), **ids, fields.RECORD: record})
  _generation(folder, origin, plain, ids)
  called = {e.ours: e.theirs for e in names.table(plain, family.rows)}
  scaled = [called[f'layers/{l}/{leaf}'] for l, of_layer in record['folded'].items() for leaf in of_layer]
  (folder / 'README.md').write_text(card.text(
      name, model_type=model_type, auto=AUTO.get(plain.family) or config_json.BERT_AUTO[plain.head],
      has_tokenizer=(folder / 'tokenizer_config.json').exists(), scheme=record['scheme'], scaled=scaled,
      facts=_facts(origin, plain, shapes)), encoding='utf-8')
  total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
  return {'files': written, 'tensors': len(shapes), 'bytes': total}


def _tensors(plain, params, family: families.Family, dtype):
  """({name: shape}, name -> tensor) as Hugging Face has them."""
  leaves, entries = dict(by_layer.leaves(layout.unstack(params))), {}
  for e in names.table(plain, family.rows):
    entries.setdefault(e.theirs, []).append(e)
  def get(name):
    parts = sorted(entries[name], key=lambda e: e.part)
    arrays = [e.write(np.asarray(leaves[e.ours]), plain) for e in parts]
    return _cast(name, arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=parts[0].axis), dtype)
  return {name: of[0].whole(leaves[of[0].ours], plain) for name, of in entries.items()}, get


def _cast(name: str, x: np.ndarray, dtype) -> np.ndarray:
  """x rounded to a type. Raises UserError for a number that the type does not have."""
  with np.errstate(over='ignore'):
    found = x.astype(dtype)
  if not np.isfinite(np.asarray(found, np.float32)).all():
    where = f'--dtype={dtype.name}' if np.isfinite(np.asarray(x, np.float32)).all() else 'the model'
    raise UserError(f'tensor {name} has a number that is not finite in {where}'
                    + ('; bfloat16 reaches further.' if dtype == np.float16 else '.'))
  return found


def _generation(folder, origin: Origin, plain, ids: dict):
  """generation_config.json: the one that the model came with, or where a text begins and ends."""
  given = origin.path / 'generation_config.json'
  if origin.run is None and given.is_file():
    shutil.copyfile(given, folder / given.name)
  elif plain.family == 'decoder':
    files.write_json(folder / 'generation_config.json', ids)


def _facts(origin: Origin, plain, shapes: dict) -> dict:
  """What the card's table says."""
  facts = {'parameters': sum(int(np.prod(shape)) for shape in shapes.values()), 'layers': plain.num_layers,
           'layers of the original': plain.depth if plain.depth != plain.num_layers else None,
           'origin': origin.path.name}
  if origin.run is None or not origin.step:  # an imported model's settings are of a training that is to come
    return facts
  info, run, result = run_info.read(origin.path), origin.run, _result(origin)
  unit = 'images' if plain.family == 'vit' else 'tokens'
  pruned = info.get('origin', {}).get('removed_layers')
  return facts | {
      'layers removed before': str(pruned) if pruned else None, 'updates': origin.step,
      f'{unit} seen': result.get(f'train_{unit}'), 'rows an update': run.train.batch_size,
      'peak learning rate': run.optimizer.lr, 'data': pathlib.PurePath(run.data.source).name,
      'validation loss': result.get('loss'), 'perplexity': result.get('perplexity'),
      'accuracy': result.get('accuracy'), 'seed': run.train.seed, 'corpus hash': info.get('corpus_hash'),
      'commit': info.get('commit')}


def _result(origin: Origin) -> dict:
  """result.json of the run, if it is of this very step."""
  path = origin.path / 'result.json'
  found = files.read_json(path, f'run the training command of {origin.path} again') if path.is_file() else {}
  return found if found.get('step') == origin.step else {}


def _batch(plain, tokenizer: tokenizers.Tokenizer | None) -> np.ndarray:
  """A few rows of English through the model's tokenizer; random ids, or images, where it has none."""
  rng, length = np.random.default_rng(0), min(T, plain.max_positions or T)
  if plain.family == 'vit':
    return rng.standard_normal((ROWS, plain.image_size, plain.image_size, plain.channels)).astype(np.float32)
  if tokenizer is None:
    return rng.integers(0, plain.vocab_size, (ROWS, length)).astype(np.int32)
  english = '\n'.join(topics.values())[:16 * ROWS * length]
  return np.resize(tokenizer.encode(english), (ROWS, length))  # again from the start where it is not enough


def _check(folder, batch, model, plain, dtype) -> dict:
  """Compares the model, the plain one and the folder. Raises UserError when they differ by more than rounding."""
  wanted = _logits(*model, batch)
  scale = float(np.abs(wanted).max()) or 1.0  # of a head that is still 0
  folded = float(np.abs(_logits(*plain, batch) - wanted).max()) / scale
  cast = wanted if dtype == jnp.float32 else _logits(plain[0], jax.tree.map(lambda x: x.astype(dtype), plain[1]), batch)
  config, params, _ = load(folder)
  found = _logits(config, params, batch)
  again = float(np.abs(found - cast).max()) / scale
  for what, difference in (('the plain model', folded), ('the folder that was written', again)):
    if not difference <= CLOSE:
      raise UserError(f'logits of {what} differ from those of the model by {difference:.2g} of the largest, more than '
                      f'{CLOSE:g}: this is a fault of lns_jax, and nothing is left of the folder.')
  log_p, log_q = (np.asarray(jax.nn.log_softmax(x), np.float64) for x in (wanted, found))
  return {'tokens': int(np.prod(wanted.shape[:-1])), 'largest': scale, 'folded': folded, 'read_again': again,
          'difference': float(np.abs(found - wanted).max()),
          'kl': max(0.0, float((np.exp(log_p) * (log_p - log_q)).sum(-1).max()))}


def _logits(config, params, batch) -> np.ndarray:
  """In float32, whatever the model's own precision and products are; the states of a model without a head."""
  config = dataclasses.replace(config, precision='float32', matmul='plain', remat='none')
  run = transformer.states if config.family == 'encoder' and config.head == 'none' else transformer.forward
  return np.asarray(jax.jit(functools.partial(run, config))(layout.native(params, config), batch))
