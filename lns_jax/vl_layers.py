"""What the layers of both towers of a Qwen2.5-VL do for questions about pictures (paper appendix C, figure 10)."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import tqdm

from lns_jax import config as config_lib
from lns_jax import files
from lns_jax.data import mmmu
from lns_jax.depth import interventions, plots, removal
from lns_jax.depth.estimate import Estimate, Mean
from lns_jax.depth.interventions import Plan, ScoreFn
from lns_jax.errors import UserError
from lns_jax.interop import vl as vl_interop
from lns_jax.layers import param
from lns_jax.models import layout, transformer, vl

RECORDS, STUDY, RESULT = 'items.jsonl', 'study.json', 'vl_layers.json'
PRECISIONS = {'float32': 'float32', 'bfloat16': 'paper_bf16'}  # dtype: model.precision
TITLES = {'vision': 'Vision tower', 'text': 'Decoder'}


def measure(model, items, out, *, limit: int = 0, max_pixels: int = 0, dtype: str = '', seed: int = 0) -> dict:
  """Change of the accuracy on MMMU-form questions without each layer of either tower, one at a time, untrained.

  A model's answer is the option whose letter has the largest logit behind the question. Every question is asked of the
  whole model and of each without one layer before the next is, and its line in items.jsonl is whole: the same command
  goes on behind the last.

  Args:
    model: Hugging Face folder of a Qwen2.5-VL, with its tokenizer.
    items: JSONL file, see `mmmu.read`.
    out: folder of the results.
    limit: number of questions, the first ones; 0: all.
    max_pixels: bound on the pixels of a picture; 0: the model's own.
    dtype: of parameters and compute; '': float32 on a CPU, else bfloat16.
    seed: of the bootstrap over questions.

  Returns:
    What vl_layers.json holds: 'accuracy' and of each tower 'layer_ids' and 'drop' [L] in percentage points, all with
    their 95 % intervals over questions; 'chance', 'items', 'skipped' (open questions), 'seconds' of this call.

  Raises:
    UserError: before long work for a model, a file or a picture that is not there or not understood, a letter that is
      no token, or an `out` that belongs to another study.
  """
  start = time.perf_counter()
  asked = mmmu.read(items)
  chosen = asked.items[:limit or None]
  folder = files.absolute(out)
  dtype = dtype or param.resolve_precision('auto')
  config, params, tokenizer = _opened(model, dtype)
  processor = vl_interop.processor(model, config, max_pixels=max_pixels or None)
  ids = mmmu.Ids(config.start_id, config.image_id, config.end_id)
  mmmu.prompt(chosen[0], tokenizer, processor, ids)  # what the tokenizer lacks is said before long work
  _claim(folder, {'model': str(files.absolute(model)), 'items': asked.hash, 'dtype': dtype,
                  'config': config_lib.to_dict(config), 'tokenizer': tokenizer.hash,
                  'processor': config_lib.to_dict(processor), 'weights': _mark(params)})
  done = _records(folder / RECORDS)[:len(chosen)]
  with open(folder / RECORDS, 'a', encoding='utf-8') as sink:
    for item in tqdm.tqdm(chosen[len(done):], initial=len(done), total=len(chosen), unit='question'):
      done.append(_ask(config, params, arranged(config, mmmu.prompt(item, tokenizer, processor, ids))))
      sink.write(json.dumps(files.finite(done[-1])) + '\n')
      sink.flush()
  result = summary(config, done, seed) | {
      'model': str(model), 'dtype': dtype, 'chance': mmmu.Items(chosen, 0, '').chance, 'skipped': asked.skipped,
      'seconds': time.perf_counter() - start}
  files.write_json(folder / RESULT, files.finite(result))
  draw(result, folder)
  return {'out': str(folder), **result}


def _opened(model, dtype: str):
  """(VLConfig, stacked parameters, tokenizer) of a folder, in the type asked for."""
  config, params, tokenizer = vl_interop.load(model, dtype=dtype)
  if tokenizer is None:
    raise UserError(f'{model} holds no tokenizer; put the tokenizer.json of the model there.')
  towers = {}
  for name in vl.TOWERS:
    tower = getattr(config, name)
    removal.check_spare(tower)
    towers[name] = dataclasses.replace(tower, precision=PRECISIONS[dtype])
    params[name] = layout.stack(params[name], tower)  # one body a run of layers; each call would stack anew
  return dataclasses.replace(config, **towers), params, tokenizer


def _mark(params) -> str:
  """A hash by which other weights are told apart: of the final gains of both towers."""
  gains = [np.asarray(params[name]['final_norm']['gain'], np.float32).tobytes() for name in vl.TOWERS]
  return hashlib.sha256(b''.join(gains)).hexdigest()


def _claim(folder: pathlib.Path, study: dict):
  """Makes the folder, or refuses one whose questions were asked otherwise."""
  if (folder / STUDY).exists():
    before = json.loads((folder / STUDY).read_text())
    other = [name for name, value in json.loads(json.dumps(study)).items() if before.get(name) != value]
    if other:
      raise UserError(f'{folder} holds a study with another {other[0]}; give another folder.')
    return
  if folder.exists() and any(folder.iterdir()):
    raise UserError(f'{folder} is not empty and holds no study of layers; give another folder.')
  folder.mkdir(parents=True, exist_ok=True)
  files.write_json(folder / STUDY, study)


def _records(path: pathlib.Path) -> list[dict]:
  """The lines of items.jsonl that are whole; a last one that a kill has torn is cut off."""
  text = path.read_text(encoding='utf-8') if path.exists() else ''
  whole = text[:text.rfind('\n') + 1]
  if whole != text:
    files.write_text(path, whole)
  return [json.loads(line) for line in whole.splitlines()]


def _bucket(n: int, unit: int) -> int:
  """The least of unit * (16, 24, 32, 48, 64, ...) that is at least n: few shapes, each of which is compiled once."""
  size = 16
  while unit * size < n:
    size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
  return unit * size


def arranged(config: vl.VLConfig, prompt: mmmu.Prompt) -> dict:
  """A batch of one question as of `vl.arrange`, padded, with 'last' [1], 'letters' [1, K] and 'answer' [1]."""
  T = len(prompt.tokens)
  pad = (0, _bucket(T, 1) - T)
  merge = config.vision.merge ** 2
  longest = max((h * w for _, h, w in prompt.grid_thw), default=0)
  batch = vl.arrange(config, np.pad(prompt.tokens, pad)[None], prompt.patches, prompt.grid_thw,
                     segment_ids=np.pad(np.ones(T, np.int32), pad)[None],
                     most_patches=_bucket(longest, merge) if longest else 0)
  letters = np.full((1, len(mmmu.LETTERS)), -1, np.int32)
  letters[0, :len(prompt.letters)] = prompt.letters
  return batch | {'last': np.array([T - 1]), 'letters': letters, 'answer': np.array([prompt.answer])}


def _chosen(logits_BV: jax.Array, batch: Mapping) -> tuple[jax.Array, jax.Array]:
  """([1] 1 where the letter with the largest logit, the first of equals, is the answer; weight 1); NaN for NaN."""
  letters = batch['letters']
  scores = jnp.where(letters >= 0, jnp.take_along_axis(logits_BV, jnp.maximum(letters, 0), axis=1), -jnp.inf)
  right = (jnp.argmax(scores, axis=1) == batch['answer']).astype(jnp.float32)
  return jnp.where(jnp.isnan(jnp.max(scores, axis=1)), jnp.nan, right), jnp.ones(len(letters))


def by_letter(logits_BTV: jax.Array, batch: Mapping) -> tuple[jax.Array, jax.Array]:
  """A `ScoreFn` of the decoder."""
  return _chosen(jnp.take_along_axis(logits_BTV, batch['last'][:, None, None], axis=1)[:, 0], batch)


@functools.cache
def through_decoder(config: vl.VLConfig) -> ScoreFn:
  """A `ScoreFn` of the vision tower: that of the decoder whose images it has seen; batch: with 'rest' and 'decoder'."""
  def score(images: jax.Array, batch: Mapping) -> tuple[jax.Array, jax.Array]:
    rest, params = batch['rest'], batch['decoder']
    x_BTD = vl.placed(params['embed']['table'][rest['tokens']], images, rest['slots'])
    x_BTD, _ = transformer.stream(config.text, params, x_BTD, **transformer.placement(rest))
    x_BTD = jnp.take_along_axis(x_BTD, rest['last'][:, None, None], axis=1)
    return _chosen(transformer.head(config.text, params, x_BTD)[:, 0], rest)
  return score


_text_batch = jax.jit(vl.text_batch, static_argnums=0)


def _ask(config: vl.VLConfig, params, batch: dict) -> dict:
  """{'whole': whether the model is right, 'vision', 'text': [L] changes without each layer of the tower}."""
  rest = {name: v for name, v in batch.items() if name != 'vision'}
  whole, text = _without_each(config.text, params['text'], _text_batch(config, params, batch), by_letter)
  vision = [0.0] * config.vision.num_layers
  if batch['vision']:  # of a question without pictures no layer of the tower matters
    seen = batch['vision'] | {'rest': rest, 'decoder': params['text']}
    _, vision = _without_each(config.vision, params['vision'], seen, through_decoder(config))
  return {'whole': whole, 'vision': vision, 'text': text}


def _without_each(config, params, batch, score_fn: ScoreFn) -> tuple[float, list[float]]:
  """(score, changes without each layer) of one batch of one question."""
  at = np.arange(config.num_layers)
  whole, change = interventions.run(config, params, [batch], Plan.of('skip', at, at + 1), score_fn=score_fn)
  return float(whole.each()[0]), change.each()[0].tolist()


def summary(config: vl.VLConfig, records: list[dict], seed: int) -> dict:
  """Means over questions and their intervals, in percentage points; null where a layer's removal left no number."""
  number = lambda v: np.nan if v is None else v
  rows = np.array([[r['whole'], *map(number, r['vision']), *map(number, r['text'])] for r in records], np.float64)
  mean = Mean(seed)
  mean.add(100 * rows, np.ones(len(rows)))
  def values(found: Estimate, where):
    return {'value': found.value[where].tolist(), 'low': found.low[where].tolist(), 'high': found.high[where].tolist()}
  found, L = mean.estimate(), config.vision.num_layers
  parts = {'vision': slice(1, 1 + L), 'text': slice(1 + L, None)}
  return {'accuracy': values(found, 0), 'items': len(records),
          **{name: {'layer_ids': list(getattr(config, name).layer_ids), 'drop': values(found, part)}
             for name, part in parts.items()}}


@plots.styled()
def draw(result: Mapping, folder: pathlib.Path):
  """vision.svg and text.svg: the change of accuracy without each layer, as in figure 10."""
  for number, name in enumerate(vl.TOWERS):
    drop = result[name]['drop']
    band = plots.Band(*(plots.floats(drop[k]) for k in ('value', 'low', 'high')))
    figure = plots.change_bars(band, result[name]['layer_ids'], index=number, title=TITLES[name])
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': name}):
      figure.savefig(folder / f'{name}.svg', metadata={'Date': None})
