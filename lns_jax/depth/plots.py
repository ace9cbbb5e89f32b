"""Pictures of depth measures against layers, as matplotlib figures, and what all pictures have in common.

A function that compares models takes a mapping from names to curves; the position in the mapping fixes a
model's colour and dashes, and a model without a curve (None) keeps its place. Figures are narrow, so that their
text stays readable on a telephone; put several side by side.
"""

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
FEW_DECADES = 3000.0  # below it, a logarithmic axis has room for more labels than the powers of ten

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


def short(name: str, most: int) -> str:
  return name if len(name) <= most else f'{name[:most - 1]}…'


def new_figure(title: str, names: Sequence[str] = ()):
  """A figure with room for a legend of `names` below it."""
  rows = -(-len(names) // _columns(names)) if names else 0
  figure = Figure(figsize=(3.9, 2.75 + 0.19 * max(rows - 1, 0)), layout='constrained')
  axes = figure.add_subplot()
  axes.set_title(short(title, 38), loc='left', parse_math=False)
  return figure, axes


def plain_number(value: float, _=None) -> str:
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'


def scale_axis(axes, shown: tuple[float, float] | None):
  """Linear, or logarithmic where positive values range widely; a little more than `shown`, where given."""
  if shown is None:
    return
  low, high = shown
  if low > 0 and high / low > WIDE_RANGE:
    axes.set_yscale('log')
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 3) if high / low < FEW_DECADES else (1,), numticks=8))
    axes.yaxis.set_major_formatter(plain_number)
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_ylim(low / 1.3, high * 1.3)
    return
  axes.yaxis.set_major_formatter(plain_number)
  pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
  axes.set_ylim(low - pad, high + pad)


def layer_ticks(L: int) -> list[int]:
  """Up to nine of the positions 1..L: the first, and multiples of one number."""
  every = max(1, -(-L // 8))
  return sorted({1, *range(every, L + 1, every)})


def layer_axis(axes, ids: Sequence[int], embedding: bool = False):
  """Ticks at positions 1..L that carry the layers' own numbers; position 0 is the embedding."""
  ticks = layer_ticks(len(ids))
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


def legend_below(figure, handles, names: Sequence[str]):
  """Names below the picture, drawn as they are: `$` is no formula, and a leading `_` hides nothing."""
  legend = figure.legend(handles, ['-'] * len(names), loc='outside lower center', ncols=_columns(names))
  for text, name in zip(legend.get_texts(), names):
    text.set_parse_math(False)
    text.set_text(short(name, LONG_NAME))


def thin(n: int, most: int) -> np.ndarray:
  """At most `most` positions of n, evenly spread, the first and the last among them."""
  return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int))


@styled()
def by_layer(curves: Mapping[str, Band | None], ids: Sequence[int], ylabel: str, *, title: str = '',
             embedding: bool = False, shown: tuple[float, float] | None = None) -> Figure:
  """One line a model against layers, intervals shaded.

  Args:
    curves: one value a layer, [L]; [L + 1] with the embedding first. Models may differ in L.
    ids: the layers' own numbers in the deepest model, [L].
    embedding: whether curves start with the embedding.
    shown: limits of the vertical axis, to be shared by the figures that are compared.
  """
  figure, axes = new_figure(title, list(curves))
  handles, everything = {}, []
  for i, (name, band) in enumerate(curves.items()):
    if band is None:
      continue
    x = np.arange(len(band.value)) + (not embedding)
    handles[name] = axes.plot(x, floats(band.value), marker='o' if len(x) <= 40 else '', markersize=2.5, **look(i))[0]
    if band.low is not None:
      axes.fill_between(x, floats(band.low), floats(band.high), color=look(i)['color'], alpha=0.25, linewidth=0)
    everything += [v for v in band if v is not None]
  scale_axis(axes, shown or limits(*everything))
  axes.set_ylabel(ylabel)
  layer_axis(axes, ids, embedding)
  if handles:
    legend_below(figure, list(handles.values()), list(handles))
  return figure


@styled()
def pareto(curves: Mapping[str, tuple[Sequence[int], Band] | None], ylabel: str, *, title: str = '',
           chance: float | None = None) -> Figure:
  """Loss or score against the number of layers kept, one line a model, from the whole model on the right to the last.

  Args:
    curves: name -> (layers kept, their values with intervals).
    chance: what guessing scores, drawn as a dashed line.
  """
  figure, axes = new_figure(title, list(curves))
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
  scale_axis(axes, limits(*everything))
  axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))
  axes.set_xlabel('layers kept')
  axes.set_ylabel(ylabel)
  if handles:
    legend_below(figure, list(handles.values()), list(handles))
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
  figure, axes = new_figure(title)
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
  axes.yaxis.set_major_formatter(plain_number)
  axes.yaxis.set_minor_locator(ticker.NullLocator())
  axes.set_ylabel('rise of the loss, %')
  layer_axis(axes, ids)
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
  figure, axes = new_figure(title)
  x, L = np.arange(1, len(ids) + 1), len(ids)
  axes.bar(x, floats(points.value), width=0.8, color=look(index)['color'])
  if points.low is not None:
    axes.vlines(x, floats(points.low), floats(points.high), color=INK, linewidth=min(1, 30 / L))
  axes.axhline(0, color=INK, linewidth=0.8)
  scale_axis(axes, limits([0.0], shown or [], *(v for v in points if v is not None)))
  axes.set_ylabel(ylabel)
  layer_axis(axes, ids)
  axes.set_xlabel('removed layer')
  return figure
