"""The table of schemes as a picture: paired differences to pre with their intervals, best on top."""

import pathlib

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from lns_jax.depth import plots

VERDICT_COLORS = {'better': plots.COLORS[2], 'worse': plots.COLORS[1]}
NEUTRAL = '#6b7480'
LINEAR = 0.1  # nats up to which the axis is linear; a scheme that fails is farther off than all others together


@plots.styled()
def figure(summary: dict) -> Figure:
  """One line a scheme: the mean difference at its best rate and its interval, each pair a tick, the common rate a ring.

  Args:
    summary: schemes.json. Schemes that diverged stand below, without a mark.
  """
  rows = [r for r in summary['rows'] if r['tuned'].get('difference')]
  rows.sort(key=lambda r: r['tuned']['difference']['mean_difference'])
  lost = [r for r in summary['rows'] if r['tuned'].get('diverged')]
  n = len(rows) + len(lost)
  drawn = Figure(figsize=(6.4, 1.5 + 0.23 * max(n, 1)), layout='constrained')
  axes = drawn.add_subplot()
  axes.axvline(0, color=plots.INK, linewidth=0.8)
  handles = [_scheme(axes, y, row) for y, row in enumerate(rows)]
  for y, row in enumerate(lost, len(rows)):
    axes.text(0, y, f"  {row['tuned']['verdict']}", va='center', color=NEUTRAL, style='italic')
  axes.set_yticks(range(n), [r['arm'] for r in rows + lost])
  axes.set_ylim(n - 0.4, -0.6)
  axes.grid(False, axis='y')
  axes.tick_params(axis='y', length=0)
  axes.spines['left'].set_visible(False)
  _difference_axis(axes, rows)
  axes.set_title('Validation loss, difference to pre-LN', loc='left')
  if handles:
    seeds = max(r['tuned']['difference']['pairs'] for r in rows)
    drawn.legend([handles[0][0], handles[0][1], handles[0][2]],
                 ['best rate, mean and 95 % interval', f'one seed (of up to {seeds})', 'common rate, mean'],
                 loc='outside lower center', ncols=3)
  return drawn


def _scheme(axes, y: int, row: dict) -> tuple:
  """Draws one line; returns handles of its mean, its pairs and its common rate."""
  cell, common = row['tuned'], row['common'].get('difference')
  d, color = cell['difference'], VERDICT_COLORS.get(cell['verdict'], NEUTRAL)
  if d['interval']:
    axes.hlines(y, *d['interval'], color=color, linewidth=1.6)
  each = [p['difference'] for p in cell['differences']]
  ticks = axes.plot(each, np.full(len(each), y), '|', color=color, markersize=6, markeredgewidth=0.8)[0]
  ring = axes.plot([common['mean_difference'] if common else np.nan], [y], 'o', markersize=5, color='none',
                   markeredgecolor=color, markeredgewidth=0.8)[0]
  dot = axes.plot([d['mean_difference']], [y], 'o', markersize=5, color=color, zorder=3)[0]
  return dot, ticks, ring


def _difference_axis(axes, rows: list[dict]):
  """Linear, or linear up to LINEAR and logarithmic beyond where some scheme is far off."""
  ends = [x for r in rows for x in (r['tuned']['difference']['interval'] or
                                    [r['tuned']['difference']['mean_difference']])]
  far = max(map(abs, ends), default=0.0)
  if far > 5 * LINEAR:
    axes.set_xscale('symlog', linthresh=LINEAR, linscale=1.5)
    ticks = [-3, -1, -0.3, -0.1, -0.05, 0, 0.05, 0.1, 0.3, 1, 3, 10]
    low, high = 1.3 * min(min(ends), -LINEAR), 1.3 * max(max(ends), LINEAR)
    axes.set_xlim(low, high)
    axes.set_xticks([t for t in ticks if low <= t <= high])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
  axes.xaxis.set_major_formatter(lambda x, _: f'{x:+.3g}' if x else '0')
  bent = f'; logarithmic beyond {LINEAR:g}' if far > 5 * LINEAR else ''
  axes.set_xlabel(f'nats per token{bent}\ngreen: better, orange: worse, grey: no difference shown')


def save(path: pathlib.Path, summary: dict):
  """Writes the picture so that it is either whole or as before; none while it would be empty."""
  if not any(r['tuned'].get('difference') or r['tuned'].get('diverged') for r in summary['rows']):
    return
  partial = path.with_name(f'.{path.name}')
  with matplotlib.rc_context({'font.family': 'sans-serif'}):
    figure(summary).savefig(partial, format='png', dpi=160)
  partial.replace(path)
