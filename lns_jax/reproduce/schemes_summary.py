"""From records of runs to the numbers of the table of schemes."""

import collections
import dataclasses
import math

import numpy as np

from lns_jax import config as config_lib
from lns_jax import paired
from lns_jax.config import ModelConfig, RunConfig
from lns_jax.reproduce import plan

KEPT = ('arm', 'rate', 'seed', 'diverged', 'reason', 'loss', 'perplexity', 'bits_per_byte', 'train_loss', 'variance',
        'params', 'train_tokens', 'seconds', 'commit')


def summary(scale: str, base: RunConfig, arms: dict[str, dict], chosen: list[str], found: dict, losses: dict,
            speeds: dict, command: str) -> dict:
  """schemes.json.

  Args:
    base: settings that all runs share. arms: {arm: its settings}. chosen: those to run. found: records by Spec.
    losses: by Spec. speeds: {arm: `job.speed`}. command: what makes this table.
  """
  names, common = [a for a in arms if any(s.arm == a for s in found)], base.optimizer.lr
  return {'item': 'schemes', 'scale': scale, 'common_rate': common,
          'rows': [_row(a, arms[a], common, found, losses, speeds.get(a)) for a in names],
          'missing_runs': _missing([a for a in arms if a in names or a in chosen], common, found, losses),
          'runs': [{k: r.get(k) for k in KEPT} for _, r in sorted(found.items())],
          'settings': config_lib.to_dict(base), 'own_settings': own_settings(base.model, [arms[a] for a in names]),
          'command': command, **_header(found)}


def _missing(names: list[str], common: float, found: dict, losses: dict) -> int:
  """How many runs are to come, as far as the losses tell."""
  return plan.expected(names, common, losses) - sum(s in found for s in plan.wanted(names, common, losses))


def own_settings(model: ModelConfig, arms: list[dict]) -> list[dict]:
  """Model settings that only one of the arms' schemes reads: [{'setting', 'value', 'default', 'meaning'}]."""
  shown = {a['model']['scheme'] for a in arms}
  return [{'setting': f.name, 'value': getattr(model, f.name), 'default': f.default,
           'meaning': f.metadata['doc'].rstrip('.')}
          for f in dataclasses.fields(ModelConfig) if f.metadata['scheme'] in shown]


def _header(found: dict) -> dict:
  """What all runs say of where they ran; commits are counted."""
  some = next(iter(found.values()), {})
  evaluated = next((r['tokens'] for r in found.values() if not r['diverged']), None)
  return {'corpus_hash': some.get('corpus_hash'), 'cores': some.get('cores'), 'hardware': some.get('hardware'),
          'versions': some.get('versions'), 'eval_tokens': evaluated,
          'commits': dict(collections.Counter(str(r['commit']) for r in found.values()))}


def _row(arm: str, settings: dict, common: float, found: dict, losses: dict, speed: dict | None) -> dict:
  best = plan.best_rate(arm, common, losses)
  base_best = plan.best_rate(plan.BASELINE, common, losses)
  tried = [s for s in plan.grid(arm, common, losses) if s in losses]
  tuned = cell(arm, best, losses, plan.Spec(plan.BASELINE, base_best, 0) if base_best else None) if best else {}
  if not best and tried and all(math.isinf(losses[s]) for s in tried):
    tuned = {'verdict': 'diverged', 'diverged': len(tried)}
  last = [found[s]['variance'][-1] for s in found if s.arm == arm and s.rate == best and not found[s]['diverged']]
  return {'arm': arm, 'settings': settings, 'grid': [{'rate': s.rate, 'loss': losses[s]} for s in tried],
          'best_rate': best, 'best_rate_at_an_end': plan.at_the_end(arm, common, losses),
          'common': cell(arm, common, losses, plan.Spec(plan.BASELINE, common, 0)), 'tuned': tuned,
          'last_variance': float(np.mean(last)) if last else None,
          'params': next((r['params'] for s, r in found.items() if s.arm == arm and not r['diverged']), None),
          'speed': speed and {k: speed[k] for k in (
              'ratio', 'low', 'high', 'steps', 'tokens_per_second', 'cores', 'commit')}}


def cell(arm: str, rate: float, losses: dict, base: plan.Spec | None) -> dict:
  """An arm at one rate: losses of all seeds, their mean, and the paired difference to pre.

  Args:
    base: pre at the rate to compare with, of whatever seed.

  Returns {'rate', 'losses' [{'seed', 'loss' (infinite: diverged)}], 'mean' (None where a seed diverged), 'diverged'
  (seeds that did), 'differences' [{'seed', 'difference'}], 'difference' (`paired.interval`; None without pairs, and
  where a seed diverged: those left are not a fair sample), 'verdict'}.
  """
  of_seed = lambda arm, rate: {s.seed: x for s, x in sorted(losses.items()) if s.arm == arm and s.rate == rate}
  mine, theirs = of_seed(arm, rate), of_seed(base.arm, base.rate) if base else {}
  diverged = sum(map(math.isinf, mine.values()))
  pairs = {} if arm == plan.BASELINE or diverged else {
      seed: x - theirs[seed] for seed, x in mine.items() if math.isfinite(theirs.get(seed, math.inf))}
  difference = paired.interval(list(pairs.values())) if pairs else None
  lost = '' if not diverged else 'diverged' if diverged == len(mine) else f'{diverged} of {len(mine)} diverged'
  return {'rate': rate, 'losses': [{'seed': s, 'loss': x} for s, x in mine.items()], 'diverged': diverged,
          'mean': float(np.mean(list(mine.values()))) if mine and not diverged else None,
          'differences': [{'seed': s, 'difference': d} for s, d in pairs.items()], 'difference': difference,
          'verdict': lost or ('baseline' if arm == plan.BASELINE else verdict(difference))}


def verdict(difference: dict | None) -> str:
  """In words, 'better' and 'worse' only where the whole interval is on one side of 0 (losses: below is better)."""
  if difference is None or difference['interval'] is None:
    return 'too few pairs'
  low, high = difference['interval']
  return 'better' if high < 0 else 'worse' if low > 0 else 'no difference shown'
