"""Pictures of what is measured while training: against optimizer updates, or by layer at some of them."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from lns_jax.depth import plots
from lns_jax.depth.plots import Line, floats

TIME_COLORS = 'plasma_r'  # its first fifth, yellow, does not show on white


def _step_axis(axes):
  axes.set_xlabel('optimizer update')
  axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
  axes.xaxis.set_major_formatter(plots.plain_number)


@plots.styled()
def over_steps(curves: Mapping[str, Line | None], ylabel: str, *, title: str = '',
               points: Mapping[str, Line] | None = None, zero: bool = False) -> Figure:
  """One line a model against optimizer updates.

  Args:
    points: further values of the same models, drawn as circles: evaluations.
    zero: whether to draw the line of no difference.
  """
  figure, axes = plots.new_figure(title, list(curves))
  if zero:
    axes.axhline(0, color=plots.INK, linewidth=0.8)
  handles, everything = {}, [[0.0]] if zero else []
  for i, (name, line) in enumerate(curves.items()):
    if line is None:
      continue
    kept = plots.thin(len(line.steps), plots.MAX_POINTS)
    value = floats(line.value)[kept]
    handles[name] = axes.plot(np.asarray(line.steps)[kept], value, **plots.look(i))[0]
    everything.append(value)
    if points and name in points:
      axes.plot(points[name].steps, floats(points[name].value), 'o', markersize=5, markeredgecolor=plots.INK,
                markeredgewidth=0.6, color=plots.look(i)['color'], clip_on=False, zorder=3)
      everything.append(points[name].value)
  plots.scale_axis(axes, plots.limits(*everything))
  axes.set_ylabel(ylabel)
  _step_axis(axes)
  if handles:
    plots.legend_below(figure, list(handles.values()), list(handles))
  return figure


@plots.styled()
def layers_over_steps(steps: Sequence[float], values, ids: Sequence[int], ylabel: str, *, title: str = '',
                      shown: tuple[float, float] | None = None) -> Figure:
  """One line a layer against optimizer updates, coloured by depth (the form of the paper's figure 4).

  Args:
    values: [steps, L + 1], the embedding (drawn dashed) first. Of a model deeper than MAX_LINES an even choice
      of layers is drawn.
    shown: limits of the vertical axis, to be shared by the figures that are compared.
  """
  figure, axes = plots.new_figure(title)
  values, steps = floats(values), np.asarray(steps)
  kept = plots.thin(len(steps), plots.MAX_POINTS // 8)
  colors, L = matplotlib.colormaps[plots.DEPTH_COLORS], len(ids)
  place = lambda i: i / max(L - 1, 1) * 0.95  # the brightest yellow does not show on white
  axes.plot(steps[kept], values[kept, 0], color=plots.INK, linestyle=plots.DASHES[1], linewidth=1)
  for i in plots.thin(L, plots.MAX_LINES):
    axes.plot(steps[kept], values[kept, i + 1], color=colors(place(i)), linewidth=1.2)
  plots.scale_axis(axes, shown or plots.limits(values))
  axes.set_ylabel(ylabel)
  _step_axis(axes)
  shades = matplotlib.colors.ListedColormap([colors(place(i)) for i in range(L)])
  key = matplotlib.cm.ScalarMappable(matplotlib.colors.BoundaryNorm(np.arange(0.5, L + 1), L), shades)
  bar = figure.colorbar(key, ax=axes, label='layer', pad=0.02)
  ends = sorted({1, (L + 1) // 2, L})
  bar.set_ticks(ends, labels=[str(ids[i - 1]) for i in ends])
  bar.minorticks_off()
  return figure


@plots.styled()
def by_layer_at_steps(steps: Sequence[int], values, ids: Sequence[int], ylabel: str, *, title: str = '',
                      shown: tuple[float, float] | None = None) -> Figure:
  """One line an update against layers, the darker the later (the paper's figure 9, its panels in one).

  Args:
    steps: the few updates to draw. values: [steps, L + 1], the embedding first.
    shown: limits of the vertical axis, to be shared by the figures that are compared.
  """
  names = [f'update {step:,}' for step in steps]
  figure, axes = plots.new_figure(title, names)
  colors, values = matplotlib.colormaps[TIME_COLORS], floats(values)
  handles = [axes.plot(row, color=colors(0.2 + 0.8 * i / max(len(values) - 1, 1)), marker='o' if len(row) <= 40 else '',
                       markersize=2.5)[0] for i, row in enumerate(values)]
  plots.scale_axis(axes, shown or plots.limits(values))
  axes.set_ylabel(ylabel)
  plots.layer_axis(axes, ids, embedding=True)
  plots.legend_below(figure, handles, names)
  return figure
