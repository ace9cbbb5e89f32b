"""Our models as models of EleutherAI's lm-eval, which turns tasks into strings and asks for three things about them.

Importing this module registers the name `lns_jax`: `lm_eval.simple_evaluate(model='lns_jax', model_args='path=...')`.
A text has one BOS in front where the model was trained with one, and never two.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import tqdm
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lns_jax import sharding
from lns_jax.config import ModelConfig
from lns_jax.data import tokenizers
from lns_jax.errors import UserError
from lns_jax.interop import generate, text_rules
from lns_jax.interop.likelihood import Scorer
from lns_jax.interop.load import load_in

GENERATED = 256  # tokens at most, where a task does not say
PROMPTS = 32  # that are generated from at a time, where the size of a batch is not given


class Model(TemplateLM):
  """An opened decoder.

  Contexts are the tokens of the context, continuations those that context and continuation together have beyond them,
  white space between them being the continuation's; what does not fit is cut on the left, BOS included.

  Args:
    config, params, tokenizer: what `lns_jax.load` returns.
    rules: how text enters it.
    add_bos: overrides what they say of BOS.
    max_length: overrides the length that they say.
    batch_size: rows of a batch; 0: as fits, by length.
    seed: of what is drawn in generation.

  Raises:
    UserError: the model is no decoder, has no tokenizer or one with more tokens than it has, or BOS is wanted of a
      tokenizer that has none.
  """

  def __init__(self, config: ModelConfig, params, tokenizer: tokenizers.Tokenizer, rules: text_rules.TextRules, *,
               add_bos: bool | None = None, max_length: int = 0, batch_size: int = 0, seed: int = 0):
    super().__init__()
    if config.family != 'decoder':
      raise UserError(f'a model of family {config.family} gives no log-likelihoods of text, which these tasks need.')
    if tokenizer is None:
      raise UserError('the model has no tokenizer, without which no task can be read.')
    tokenizers.check_vocab(tokenizer, config.vocab_size)
    if add_bos and tokenizer.bos_id is None:
      raise UserError(f'--add_bos: the tokenizer {tokenizer.name} has no BOS.')
    self.tokenizer = tokenizer
    self.bos_id = rules.bos_id if add_bos is None else tokenizer.bos_id if add_bos else None
    self.max_length = max_length or rules.length or text_rules.LENGTH
    self.cut = 0
    self._config = dataclasses.replace(config, loop='scan')  # one compiled body serves all layers
    mesh = sharding.shared(config)
    self._params = sharding.stack(mesh, config, params)
    self._batch_size, self._seed = batch_size, seed
    self._scorer = Scorer(
        self._config, self._params, max_length=self.max_length, batch_size=batch_size, mesh=mesh)

  @property
  def eot_token_id(self) -> int | None:
    return self.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """What stands before a text that has no context: BOS, or EOS of a tokenizer without one, as lm-eval has it."""
    for token in (self.tokenizer.bos_id, self.tokenizer.eos_id):
      if token is not None:
        return token
    raise UserError(f'the tokenizer {self.tokenizer.name} has neither BOS nor EOS, so that a text without context '
                    'cannot be scored.')

  @property
  def tokenizer_name(self) -> str:
    return self.tokenizer.name

  def get_model_info(self) -> dict:
    """What decides the numbers beside the weights: the first token, the length, the tokenizer."""
    return {'adds_bos': self.bos_id is not None, 'bos_id': self.bos_id, 'eos_id': self.tokenizer.eos_id,
            'max_length': self.max_length, 'tokenizer': self.tokenizer.name, 'tokenizer_hash': self.tokenizer.hash,
            'vocab_size': self.tokenizer.vocab_size}

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
    """Ids of a text, behind one BOS if the model was trained so, or the text spells it; False: of the text alone."""
    spelt = self.tokenizer.bos
    starts = bool(spelt) and string.startswith(spelt) and add_special_tokens is None
    ids = self.tokenizer.encode(string.removeprefix(spelt) if starts else string).tolist()
    if starts or (self.bos_id is not None and add_special_tokens is not False):
      ids.insert(0, self.tokenizer.bos_id)
    return ids

  def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
    pairs = []
    for strings, context, wanted in requests:
      if not wanted:
        raise UserError(f'the continuation {_short(strings[1])} adds no token to its context {_short(strings[0])}.')
      if len(wanted) > self.max_length:
        raise UserError(f'the continuation {_short(strings[1])} has {len(wanted)} tokens, and the model reads '
                        f'{self.max_length}.')
      pairs.append((context or [self.prefix_token_id], wanted))  # a context of white space has none of its own
      self.cut += len(context) + len(wanted) > self.max_length + 1
    with _bar(len(pairs), 'scoring', disable_tqdm) as bar:
      found = self._scorer.score(pairs, bar.update)
    for (strings, *_), answer in zip(requests, found):
      if strings is not None:
        self.cache_hook.add_partial('loglikelihood', strings, answer)
    return found

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Log-probability of each whole text; every token of it is scored once, BOS never, whatever number of windows."""
    windows, owners = [], []
    for number, request in enumerate(requests):
      ids = self.tok_encode(request.args[0], add_special_tokens=False)
      for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
        windows.append((None, *make_disjoint_window(pair)))
        owners.append(number)
    sums = np.zeros(len(requests))
    for number, (nats, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
      sums[number] += nats
    for request, total in zip(requests, sums):
      self.cache_hook.add_partial('loglikelihood_rolling', request.args, float(total))
    return sums.tolist()

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """What the model writes behind each context, up to the first of the strings that end it, which is left out."""
    found, groups = [''] * len(requests), {}
    for number, request in enumerate(requests):
      groups.setdefault(repr(request.args[1]), []).append(number)
    size = self._batch_size or PROMPTS
    with _bar(len(requests), 'generating', disable_tqdm) as bar:
      for numbers in groups.values():
        numbers.sort(key=lambda n: -len(requests[n].args[0]))
        for start in range(0, len(numbers), size):
          part = numbers[start:start + size]
          texts = self._write([requests[n].args[0] for n in part], requests[part[0]].args[1], part)
          for number, text in zip(part, texts):
            found[number] = text
            self.cache_hook.add_partial('generate_until', requests[number].args, text)
          bar.update(len(part))
    return found

  def _write(self, contexts: Sequence[str], settings: dict, numbers: Sequence[int]) -> list[str]:
    """Texts of one batch whose settings are the same; what is drawn depends on a request's number, not on the batch."""
    settings = normalize_gen_kwargs(settings, GENERATED)
    most, until = settings['max_gen_toks'], [s for s in settings['until'] if s]
    room = self.max_length - most
    if room < 1:
      raise UserError(f'the task asks for {most} new tokens, which leaves no room for a context of a model that reads '
                      f'{self.max_length}.')
    prompts = [(self.tok_encode(text) or [self.prefix_token_id])[-room:] for text in contexts]
    written = generate.generate(
        self._config, self._params, prompts, max_new=most, eos_id=self.tokenizer.eos_ids,
        temperature=settings.get('temperature', 1.0) if settings['do_sample'] else 0.0,
        top_p=settings.get('top_p', 1.0), top_k=settings.get('top_k', 0), seed=self._seed, rows=numbers,
        stop=generate.at_strings(self.tokenizer, until))
    return [generate.before(self.tokenizer.decode(ids), until) for ids in written]


@register_model('lns_jax')
class Opened(Model):
  """The same of a path, for `model_args`: whatever `lns_jax.load` opens, and its arguments."""

  def __init__(self, path: str, step: int | None = None, dtype: str = '', scheme: str | None = None,
               add_bos: bool | None = None, max_length: int = 0, batch_size: int | str = 0, seed: int = 0,
               **of_other_models):
    if of_other_models.keys() - {'device', 'max_batch_size'}:  # which lm-eval gives to every model
      raise UserError(f'model_args of lns_jax do not know {", ".join(sorted(of_other_models))}.')
    config, params, tokenizer = load_in(dtype, path, step=step, scheme=scheme, sharding=sharding.share)
    super().__init__(config, params, tokenizer, text_rules.of(path, config, tokenizer), add_bos=add_bos,
                     max_length=max_length, batch_size=0 if batch_size == 'auto' else int(batch_size), seed=seed)


def _bar(total: int, what: str, disable: bool) -> tqdm.tqdm:
  return tqdm.tqdm(total=total, desc=what, unit='request', mininterval=0.5, dynamic_ncols=True,
                   disable=disable or jax.process_index() != 0)


def _short(text: str) -> str:
  """The end of a text, for a message."""
  return repr(text if len(text) <= 40 else '...' + text[-40:])
