"""The table of schemes as Markdown."""

import math

HEAD = ('scheme', 'best rate', 'loss at the common rate', 'to pre', 'loss at its best rate', 'to pre', 'verdict',
        'last variance', 'speed')


def docs_table(summary: dict) -> str:
  """The Markdown table alone, best first, from schemes.json. Losses are means over seeds, their number in brackets."""
  rows = sorted(summary['rows'], key=lambda r: _or(r['tuned'].get('mean'), math.inf))
  lines = [HEAD, ('---',) + ('---:',) * (len(HEAD) - 1)]
  lines += [(f"`{r['arm']}`", _rate(r), _loss(r['common']), _difference(r['common']), _loss(r['tuned']),
             _difference(r['tuned']), r['tuned'].get('verdict', ''), _number(r['last_variance']), _speed(r['speed']))
            for r in rows]
  return ''.join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page(summary: dict) -> str:
  """schemes.md: the table and how it was made."""
  missing = summary['missing_runs']
  head = f'About {missing} runs are still to come.\n\n' if missing else ''
  return f'# Schemes at scale {summary["scale"]}\n\n{head}{docs_table(summary)}\n{notes(summary)}'


def notes(summary: dict) -> str:
  """What a reader of the table must know, as a Markdown list."""
  s, cores = summary['settings'], summary['cores']
  m, t, hardware = s['model'], s['train'], summary['hardware'] or {}
  commits = ', '.join(f'{_commit(c)} ({n} runs)' for c, n in summary['commits'].items())
  speed = next((r['speed'] for r in summary['rows'] if r['arm'] == 'pre' and r['speed']), None)
  lines = [
      f"Each run: {m['num_layers']} layers of width {m['d_model']}, vocabulary {m['vocab_size']}, init {m['init']} "
      f"(std {m['init_std']:g}), {t['steps']} updates of {t['batch_size']} x {s['data']['seq_len']} tokens; validation "
      f"loss in nats per token on the first {_or(summary['eval_tokens'], 0):,} tokens of the split.",
      f"The common rate, {summary['common_rate']:g}, is that of the shipped config, chosen there for pre. Every scheme "
      'tried half and twice of it, too, and went on by factors of 2, twice at most, while the best was at an end '
      '(marked > or < where it still is). The best rate is that of seed 0 alone: a choice by one seed that treats all '
      'alike, and that seed is among those averaged.',
      'Seeds are paired: seed s gives every scheme the same order of rows and the same draws of initial weights. '
      "'to pre' is the mean paired difference and its 95 % interval (Student's t over pairs); the verdict is of the "
      "best rates, and says 'better' or 'worse' only where the interval excludes 0. Each interval stands alone: of "
      'twenty schemes equal to pre about one would get a verdict by chance.',
      "A diverged run counts as an infinite loss. Where a seed diverged there is no mean, no interval and no 'better' "
      "or 'worse': the verdict is how many did. Last variance: over the hidden units, at what leaves the last block, "
      'mean over the tokens of the last training batch, before the last update, and over the seeds at the best rate.',
      f"{hardware.get('cpu') or hardware.get('device')}, {hardware.get('backend')}, "
      f"{_processors(cores)} a run; jax {(summary['versions'] or {}).get('jax')}, "
      f"Python {hardware.get('python')}; corpus {_or(summary['corpus_hash'], '')[:12]}; commit {commits}.",
      f"Command: `{summary['command']}`."]
  lines[1:1] = filter(None, [_own(summary['own_settings']), _variants(summary['rows'])])
  if speed:
    lines.insert(-2, f"Speed: tokens a second over pre's, median [lowest, highest] of rounds in which {speed['steps']} "
                 "compiled train steps of each took turns; pre's own row shows the noise, its rate is "
                 f"{speed['tokens_per_second'][0]:,.0f} tokens/s on {_processors(speed['cores'])}, commit "
                 f"{_commit(speed['commit'])}.")
  return ''.join(f'- {line}\n' for line in lines)


def _own(settings: list[dict]) -> str:
  """Settings that one scheme alone reads, with their meaning: what 0 or -1 stands for is said there."""
  say = lambda o: f"`{o['setting']}` = {o['value']} ({o['meaning']}{_default(o)})"
  return f"Settings of a single scheme: {'; '.join(map(say, settings))}." if settings else ''


def _default(own: dict) -> str:
  return '' if own['value'] == own['default'] else f"; by default {own['default']}"


def _variants(rows: list[dict]) -> str:
  """Rows that are a scheme with other settings."""
  texts = []
  for row in rows:
    others = [f'{k} = {v}' for group in row['settings'].values() for k, v in group.items() if k != 'scheme']
    if others:
      texts.append(f"`{row['arm']}` is `{row['settings']['model']['scheme']}` with {', '.join(others)}")
  return f"{'; '.join(texts)}." if texts else ''


def _commit(commit: str | None) -> str:
  return f"{str(commit)[:12]}{'-dirty' * str(commit).endswith('dirty')}"


def _processors(n: int | None) -> str:
  return f"{n} processor{'s' * (n != 1)}"


def _or(value, other):
  return other if value is None else value


def _number(value: float | None) -> str:
  return '' if value is None else f'{value:.3g}' if 1e-3 <= abs(value) < 1e4 else f'{value:.1e}'


def _rate(row: dict) -> str:
  if row['best_rate'] is None:
    return ''
  rates = [g['rate'] for g in row['grid']]
  end = '' if not row['best_rate_at_an_end'] else '> ' if row['best_rate'] == rates[-1] else '< '
  return f"{end}{row['best_rate']:g}"


def _loss(cell: dict) -> str:
  n = len(cell.get('losses', ()))
  if n and cell['diverged']:
    return f"{cell['diverged']} of {n} diverged"
  return '' if cell.get('mean') is None else f"{cell['mean']:.4f} ({n})"


def _difference(cell: dict) -> str:
  d = cell.get('difference')
  if d is None:
    return ''
  interval = '' if d['interval'] is None else ' [{:+.4f}, {:+.4f}]'.format(*d['interval'])
  return f"{d['mean_difference']:+.4f}{interval}"


def _speed(speed: dict | None) -> str:
  return '' if speed is None else f"{speed['ratio']:.3f} [{speed['low']:.3f}, {speed['high']:.3f}]"
