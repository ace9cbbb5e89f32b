"""Pictures of depth measures: functions from arrays to matplotlib figures, and figures to inline SVG.

A function that compares models takes a mapping from names to curves; the position in the mapping fixes a
model's colour and dashes, and a model without a curve (None) keeps its place. Figures are narrow, so that their
text stays readable on a telephone; put several side by side.
"""

import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

INK, FAINT = '#1f2429', '#c9ced4'
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')  # Okabe and Ito: safe for the colour-blind
DASHES = ('-', (0, (4, 1.5)), (0, (1, 1)))
DEPTH_COLORS = 'viridis'
ANGLE_COLORS = 'viridis_r'  # yellow is small, as in the paper's figures
NOT_MEASURED = 'none'
MAX_LINES, MAX_POINTS, LONG_NAME = 32, 400, 40
WIDE_RANGE = 30.0  # largest over smallest value from which on a logarithmic axis shows more

_STYLE = {
    'font.size': 8.5, 'axes.titlesize': 9.5, 'axes.titleweight': 'bold', 'axes.labelsize': 8.5, 'legend.fontsize': 8.5,
    'text.color': INK, 'axes.labelcolor': INK, 'axes.edgecolor': INK, 'xtick.color': INK, 'ytick.color': INK,
    'axes.linewidth': 0.6, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True,
    'grid.color': FAINT, 'grid.linewidth': 0.5, 'lines.linewidth': 1.4, 'legend.frameon': False,
    'axes.axisbelow': True, 'image.interpolation': 'none',
}
styled = lambda: matplotlib.rc_context(_STYLE)


class Band(NamedTuple):
  """Values and, where they are sampled, their interval; arrays of one shape."""

  value: Sequence[float]
  low: Sequence[float] | None = None
  high: Sequence[float] | None = None


class Line(NamedTuple):
  """Values against steps; arrays of one length."""

  steps: Sequence[float]
  value: Sequence[float]


def look(index: int) -> dict:
  """Colour and dashes of the index-th model."""
  return {'color': COLORS[index % len(COLORS)], 'linestyle': DASHES[index // len(COLORS) % len(DASHES)]}


def floats(values) -> np.ndarray:
  """Nested lists -> float64, None -> NaN."""
  return np.array(values, dtype=np.float64)


def limits(*arrays) -> tuple[float, float] | None:
  """(smallest, largest) finite value, for axes that several figures share; None when there is none."""
  values = np.concatenate([np.ravel(floats(a)) for a in arrays]) if arrays else np.zeros(0)
  values = values[np.isfinite(values)]
  return (float(values.min()), float(values.max())) if len(values) else None


def _short(name: str, most: int) -> str:
  return name if len(name) <= most else f'{name[:most - 1]}…'


def _new(title: str, names: Sequence[str] = ()):
  """A figure with room for a legend of `names` below it."""
  rows = -(-len(names) // _columns(names)) if names else 0
  figure = Figure(figsize=(3.9, 2.75 + 0.19 * max(rows - 1, 0)), layout='constrained')
  axes = figure.add_subplot()
  axes.set_title(_short(title, 38), loc='left', parse_math=False)
  return figure, axes


def _plain_number(value: float, _=None) -> str:
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'


def _scale(axes, shown: tuple[float, float] | None):
  """Linear, or logarithmic where positive values range widely; a little more than `shown`, where given."""
  if shown is None:
    return
  low, high = shown
  if low > 0 and high / low > WIDE_RANGE:
    axes.set_yscale('log')
    axes.yaxis.set_major_locator(ticker.LogLocator(numticks=8))
    axes.yaxis.set_major_formatter(_plain_number)
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_ylim(low / 1.3, high * 1.3)
    return
  axes.yaxis.set_major_formatter(_plain_number)
  pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
  axes.set_ylim(low - pad, high + pad)


def _step_axis(axes):
  axes.set_xlabel('optimizer update')
  axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
  axes.xaxis.set_major_formatter(_plain_number)


def _ticks(L: int) -> list[int]:
  """Up to nine of the positions 1..L: the first, and multiples of one number."""
  every = max(1, -(-L // 8))
  return sorted({1, *range(every, L + 1, every)})


def _layer_axis(axes, ids: Sequence[int], embedding: bool = False):
  """Ticks at positions 1..L that carry the layers' own numbers; position 0 is the embedding."""
  ticks = _ticks(len(ids))
  if embedding and ticks[-1] > 8:
    ticks = ticks[1:]  # the labels of 0 and 1 would touch
  labels = [str(ids[i - 1]) for i in ticks]
  if embedding:
    ticks, labels = [0, *ticks], ['emb', *labels]
  axes.set_xticks(ticks, labels)
  axes.set_xlabel('layer')


def _columns(names: Sequence[str]) -> int:
  longest = max(map(len, names))
  return min(len(names), 3 if longest <= 12 else 2 if longest <= 17 else 1)


def _legend(figure, handles, names: Sequence[str]):
  """Names below the picture, drawn as they are: `$` is no formula, and a leading `_` hides nothing."""
  legend = figure.legend(handles, ['-'] * len(names), loc='outside lower center', ncols=_columns(names))
  for text, name in zip(legend.get_texts(), names):
    text.set_parse_math(False)
    text.set_text(_short(name, LONG_NAME))


def _thin(n: int, most: int) -> np.ndarray:
  """At most `most` positions of n, evenly spread, the first and the last among them."""
  return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int))


@styled()
def over_steps(curves: Mapping[str, Line | None], ylabel: str, *, title: str = '',
               points: Mapping[str, Line] | None = None, zero: bool = False) -> Figure:
  """One line a model against optimizer updates.

  Args:
    points: further values of the same models, drawn as circles: evaluations.
    zero: whether to draw the line of no difference.
  """
  figure, axes = _new(title, list(curves))
  if zero:
    axes.axhline(0, color=INK, linewidth=0.8)
  handles, everything = {}, [[0.0]] if zero else []
  for i, (name, line) in enumerate(curves.items()):
    if line is None:
      continue
    kept = _thin(len(line.steps), MAX_POINTS)
    value = floats(line.value)[kept]
    handles[name] = axes.plot(np.asarray(line.steps)[kept], value, **look(i))[0]
    everything.append(value)
    if points and name in points:
      axes.plot(points[name].steps, floats(points[name].value), 'o', markersize=5, markeredgecolor=INK,
                markeredgewidth=0.6, color=look(i)['color'], clip_on=False, zorder=3)
      everything.append(points[name].value)
  _scale(axes, limits(*everything))
  axes.set_ylabel(ylabel)
  _step_axis(axes)
  if handles:
    _legend(figure, list(handles.values()), list(handles))
  return figure


@styled()
def by_layer(curves: Mapping[str, Band | None], ids: Sequence[int], ylabel: str, *, title: str = '',
             embedding: bool = False) -> Figure:
  """One line a model against layers, intervals shaded.

  Args:
    curves: one value a layer, [L]; [L + 1] with the embedding first. Models may differ in L.
    ids: the layers' own numbers in the deepest model, [L].
    embedding: whether curves start with the embedding.
  """
  figure, axes = _new(title, list(curves))
  handles, everything = {}, []
  for i, (name, band) in enumerate(curves.items()):
    if band is None:
      continue
    x = np.arange(len(band.value)) + (not embedding)
    handles[name] = axes.plot(x, floats(band.value), marker='o' if len(x) <= 40 else '', markersize=2.5, **look(i))[0]
    if band.low is not None:
      axes.fill_between(x, floats(band.low), floats(band.high), color=look(i)['color'], alpha=0.25, linewidth=0)
    everything += [v for v in band if v is not None]
  _scale(axes, limits(*everything))
  axes.set_ylabel(ylabel)
  _layer_axis(axes, ids, embedding)
  if handles:
    _legend(figure, list(handles.values()), list(handles))
  return figure


@styled()
def layers_over_steps(steps: Sequence[float], values, ids: Sequence[int], ylabel: str, *, title: str = '',
                      shown: tuple[float, float] | None = None) -> Figure:
  """One line a layer against optimizer updates, coloured by depth (the form of the paper's figure 4).

  Args:
    values: [steps, L + 1], the embedding (drawn dashed) first. Of a model deeper than MAX_LINES an even choice
      of layers is drawn.
    shown: limits of the vertical axis, to be shared by the figures that are compared.
  """
  figure, axes = _new(title)
  values, steps = floats(values), np.asarray(steps)
  kept = _thin(len(steps), MAX_POINTS // 8)
  colors, L = matplotlib.colormaps[DEPTH_COLORS], len(ids)
  place = lambda i: i / max(L - 1, 1) * 0.95  # the brightest yellow does not show on white
  axes.plot(steps[kept], values[kept, 0], color=INK, linestyle=DASHES[1], linewidth=1)
  for i in _thin(L, MAX_LINES):
    axes.plot(steps[kept], values[kept, i + 1], color=colors(place(i)), linewidth=1.2)
  _scale(axes, shown or limits(values))
  axes.set_ylabel(ylabel)
  _step_axis(axes)
  shades = matplotlib.colors.ListedColormap([colors(place(i)) for i in range(L)])
  key = matplotlib.cm.ScalarMappable(matplotlib.colors.BoundaryNorm(np.arange(0.5, L + 1), L), shades)
  bar = figure.colorbar(key, ax=axes, label='layer', pad=0.02)
  ends = sorted({1, (L + 1) // 2, L})
  bar.set_ticks(ends, labels=[str(ids[i - 1]) for i in ends])
  bar.minorticks_off()
  return figure


@styled()
def heat_map(values, ids: Sequence[int], *, title: str = '', label: str = 'angular distance', top: float | None = None,
             ylabel: str = 'n layers on', symlog: bool = False) -> Figure:
  """A value for each layer l and each n; cells that are NaN are blank.

  Args:
    values: [N, L], entry [n - 1, l - 1]: angular distances of what enters layer l from what enters layer l + n, or
      costs of n layers from l on.
    top: value of the darkest colour, to be shared by the figures that are compared.
    symlog: colours linear up to 1 and logarithmic beyond, negative values as 0.
  """
  figure, axes = _new(title)
  values, L = floats(values), len(ids)
  shown = limits(values)
  top = top or (shown[1] if shown else 0.0) or 1.0
  colors = matplotlib.colormaps[ANGLE_COLORS].with_extremes(bad=NOT_MEASURED)
  scale = matplotlib.colors.SymLogNorm(1.0, vmin=0, vmax=max(top, 1.1)) if symlog else \
      matplotlib.colors.Normalize(0, top)
  image = axes.imshow(values, origin='lower', extent=(0.5, L + 0.5, 0.5, len(values) + 0.5), norm=scale, cmap=colors,
                      aspect='auto')
  axes.grid(False)
  _layer_axis(axes, ids)
  axes.set_xlabel('layer l')
  axes.set_ylabel(ylabel)
  axes.set_yticks(_ticks(len(values)))
  bar = figure.colorbar(image, ax=axes, label=label, pad=0.02)
  bar.ax.yaxis.set_major_formatter(_plain_number)
  return figure


@styled()
def square(values, *, title: str = '', label: str = '', diverging: bool = False, axis: str = '',
           ticks: Sequence[str] | None = None) -> Figure:
  """A square matrix, its first entry at the top left (similarities, Jacobians).

  Args:
    diverging: blue to red around 0, cut at the 99.5th percentile of the sizes; else 0 to the largest.
    axis: name of both axes. ticks: names of the entries; their numbers from 1 otherwise.
  """
  figure, axes = _new(title)
  values = floats(values)
  top = float(np.nanpercentile(np.abs(values), 99.5)) or 1.0
  image = axes.imshow(values, cmap='RdBu_r' if diverging else ANGLE_COLORS, vmin=-top if diverging else None,
                      vmax=top if diverging else None, aspect='equal')
  axes.grid(False)
  kept = _thin(len(values), 7)
  names = [ticks[i] if ticks else str(i + 1) for i in kept]
  axes.set_xticks(kept, names)
  axes.set_yticks(kept, names)
  axes.set_xlabel(axis)
  axes.set_ylabel(axis)
  bar = figure.colorbar(image, ax=axes, label=label, pad=0.02)
  bar.ax.yaxis.set_major_formatter(_plain_number)
  return figure


@styled()
def pareto(curves: Mapping[str, tuple[Sequence[int], Band] | None], ylabel: str, *, title: str = '',
           chance: float | None = None) -> Figure:
  """Loss or score against the number of layers kept, one line a model, from the whole model on the right to the last.

  Args:
    curves: name -> (layers kept, their values with intervals).
    chance: what guessing scores, drawn as a dashed line.
  """
  figure, axes = _new(title, list(curves))
  handles, everything = {}, []
  if chance is not None:
    axes.axhline(chance, color=INK, linewidth=0.8, linestyle=DASHES[1])
    everything.append([chance])
  for i, (name, curve) in enumerate(curves.items()):
    if curve is None:
      continue
    kept, band = curve
    handles[name] = axes.plot(kept, floats(band.value), marker='o', markersize=2.5, **look(i))[0]
    axes.fill_between(kept, floats(band.low), floats(band.high), color=look(i)['color'], alpha=0.25, linewidth=0)
    everything += list(band)
  _scale(axes, limits(*everything))
  axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))
  axes.set_xlabel('layers kept')
  axes.set_ylabel(ylabel)
  if handles:
    _legend(figure, list(handles.values()), list(handles))
  return figure


@styled()
def removal_bars(percent: Band, ids: Sequence[int], *, index: int = 0, title: str = '',
                 shown: tuple[float, float] | None = None, xlabel: str = 'removed layer') -> Figure:
  """Rise of the loss without each layer, in percent of the whole model's loss, intervals as whiskers.

  The first layer of a language model often outweighs the others a hundredfold: the axis is linear up to 1%,
  where a dashed line is drawn, and logarithmic beyond.

  Args:
    percent: [L]. index: the model's place among those compared. shown: limits shared by the compared figures.
  """
  figure, axes = _new(title)
  value, L = floats(percent.value), len(ids)
  axes.set_yscale('symlog', linthresh=1.0, linscale=1.5)
  axes.bar(np.arange(1, L + 1), value, width=0.8, color=look(index)['color'])
  if percent.low is not None:
    axes.vlines(np.arange(1, L + 1), floats(percent.low), floats(percent.high), color=INK, linewidth=min(1, 30 / L))
  axes.axhline(0, color=INK, linewidth=0.8)
  axes.axhline(1, color=INK, linewidth=0.8, linestyle=DASHES[1])
  low, high = shown or limits(*(v for v in percent if v is not None)) or (0.0, 1.0)
  axes.set_ylim(min(low * 1.3, -0.1), max(high * 1.5, 1.5))
  ticks = [-100, -30, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100, 300, 1000]
  bottom, top = axes.get_ylim()
  axes.set_yticks([t for t in ticks if bottom <= t <= top])
  axes.yaxis.set_major_formatter(_plain_number)
  axes.yaxis.set_minor_locator(ticker.NullLocator())
  axes.set_ylabel('rise of the loss, %')
  _layer_axis(axes, ids)
  axes.set_xlabel(xlabel)
  return figure


@styled()
def change_bars(points: Band, ids: Sequence[int], *, index: int = 0, title: str = '',
                shown: tuple[float, float] | None = None, ylabel: str = 'change of accuracy, points') -> Figure:
  """Change of a score without each layer, intervals as whiskers; losses hang down, as in the paper's figure 2.

  Args:
    points: [L], percentage points. index: the model's place among those compared. shown: limits that the compared
      figures share.
  """
  figure, axes = _new(title)
  x, L = np.arange(1, len(ids) + 1), len(ids)
  axes.bar(x, floats(points.value), width=0.8, color=look(index)['color'])
  if points.low is not None:
    axes.vlines(x, floats(points.low), floats(points.high), color=INK, linewidth=min(1, 30 / L))
  axes.axhline(0, color=INK, linewidth=0.8)
  _scale(axes, limits([0.0], shown or [], *(v for v in points if v is not None)))
  axes.set_ylabel(ylabel)
  _layer_axis(axes, ids)
  axes.set_xlabel('removed layer')
  return figure


_SHORTER = (  # less than half the bytes, the same picture
    (r'<g id="[^"]*"', '<g'),  # nothing refers to groups, and their names would repeat in a page
    (r' transform="rotate\(-0 [^"]*"', ''),
    (r"'DejaVu Sans'[^;\"]*", 'system-ui, sans-serif'),
    (r'\s*\n\s*', '\n'),
    (r'\n([LzQC])\b', r'\1'),
    (r'(?<= [dxy]=")[^"]*', lambda m: re.sub(r'(\.\d)\d+', r'\1', m[0])),  # to a tenth of a point
    (r'<g/>\n', ''),
    *[(r'<g>\n(<(?:path|use)[^>]*/>)\n</g>', r'\1')] * 2,
)


def svg(figure: Figure, label: str) -> str:
  """The figure as an <svg> element: text as text in the page's colours, and `label` for those who cannot see it."""
  sink = io.StringIO()
  with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': label}):
    figure.savefig(sink, format='svg', transparent=True, metadata={'Date': None})
  text = sink.getvalue()
  text = text[text.index('<svg'):]
  text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.S)
  text = re.sub(r'<svg[^>]*viewBox="([^"]*)"[^>]*>',
                lambda m: f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{m[1]}" role="img" '
                          f'aria-label="{html.escape(label)}">', text, count=1)
  for pattern, short in _SHORTER:
    text = re.sub(pattern, short, text)
  return text.replace(INK, 'currentColor').replace(FAINT, f'var(--faint,{FAINT})')
