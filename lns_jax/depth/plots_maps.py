"""Pictures of matrices and of points: heat maps, square matrices, scatter plots."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lns_jax.depth import plots
from lns_jax.depth.plots import floats


POINT_COLORS = 'plasma'
PERCENTILES = (1, 99)  # of the paper's code, for its angular heat maps


def by_row_percentile(values) -> np.ndarray:
  """Each row of [N, L] clipped to its 1st and 99th percentile, then stretched to 0..1: a display, no measure.

  So the authors draw their angular heat maps (utils/angular_analysis.py of their repository; the paper does not say
  it). Percentiles are of the cells that exist; NaN stays NaN, and a row without two different values becomes NaN,
  which the authors draw as 0.
  """
  def stretched(row):
    real = row[np.isfinite(row)]
    if len(np.unique(real)) < 2:
      return np.full_like(row, np.nan)
    low, high = np.percentile(real, PERCENTILES)
    return (np.clip(row, low, high) - low) / (high - low)
  return np.array([stretched(row) for row in floats(values)])


@plots.styled()
def heat_map(values, ids: Sequence[int], *, title: str = '', label: str = 'angular distance', top: float | None = None,
             ylabel: str = 'n layers on', symlog: bool = False) -> Figure:
  """A value for each layer l and each n; cells that are NaN are blank.

  Args:
    values: [N, L], entry [n - 1, l - 1]: angular distances of what enters layer l from what enters layer l + n, or
      costs of n layers from l on.
    top: value of the darkest colour, to be shared by the figures that are compared.
    symlog: colours linear up to 1 and logarithmic beyond, negative values as 0.
  """
  figure, axes = plots.new_figure(title)
  values, L = floats(values), len(ids)
  shown = plots.limits(values)
  top = top or (shown[1] if shown else 0.0) or 1.0
  colors = matplotlib.colormaps[plots.ANGLE_COLORS].with_extremes(bad=plots.NOT_MEASURED)
  scale = matplotlib.colors.SymLogNorm(1.0, vmin=0, vmax=max(top, 1.1)) if symlog else \
      matplotlib.colors.Normalize(0, top)
  image = axes.imshow(values, origin='lower', extent=(0.5, L + 0.5, 0.5, len(values) + 0.5), norm=scale, cmap=colors,
                      aspect='auto')
  axes.grid(False)
  plots.layer_axis(axes, ids)
  axes.set_xlabel('layer l')
  axes.set_ylabel(ylabel)
  axes.set_yticks(plots.layer_ticks(len(values)))
  bar = figure.colorbar(image, ax=axes, label=label, pad=0.02)
  bar.ax.yaxis.set_major_formatter(plots.plain_number)
  return figure


@plots.styled()
def square(values, *, title: str = '', label: str = '', diverging: bool = False, axis: str = '',
           ticks: Sequence[str] | None = None, shown: tuple[float, float] | None = None) -> Figure:
  """A square matrix, its first entry at the top left (similarities, Jacobians).

  Args:
    diverging: blue to red around 0, cut at the 99.5th percentile of the sizes.
    shown: values of the ends of the colours otherwise, to be shared by the figures that are compared.
    axis: name of both axes. ticks: names of the entries; their numbers from 1 otherwise.
  """
  figure, axes = plots.new_figure(title)
  values = floats(values)
  top = float(np.nanpercentile(np.abs(values), 99.5)) or 1.0
  low, high = (-top, top) if diverging else shown or (None, None)
  image = axes.imshow(values, cmap='RdBu_r' if diverging else plots.ANGLE_COLORS, vmin=low, vmax=high, aspect='equal')
  axes.grid(False)
  kept = plots.thin(len(values), 7)
  names = [ticks[i] if ticks else str(i + 1) for i in kept]
  axes.set_xticks(kept, names)
  axes.set_yticks(kept, names)
  axes.set_xlabel(axis)
  axes.set_ylabel(axis)
  bar = figure.colorbar(image, ax=axes, label=label, pad=0.02)
  bar.ax.yaxis.set_major_formatter(plots.plain_number)
  return figure


@plots.styled()
def scatters(panels: Mapping[str, np.ndarray], shade, *, title: str = '', label: str = '', log: bool = False) -> Figure:
  """Points in planes, one panel a plane, each with a scale of its own and no units.

  Args:
    panels: title -> points [N, 2]. shade: [N], what colours the points, the same in all panels.
    log: logarithmic colours, of a positive shade.
  """
  columns = 2 if len(panels) > 1 else 1
  rows = -(-len(panels) // columns)
  figure = Figure(figsize=(3.9, 0.75 + 1.75 * rows), layout='constrained')
  figure.suptitle(plots.short(title, 38), x=0.01, ha='left', fontsize=9.5, fontweight='bold', parse_math=False)
  grid = figure.subplots(rows, columns, squeeze=False).ravel()
  norm = (matplotlib.colors.LogNorm if log else matplotlib.colors.Normalize)(np.min(shade), np.max(shade))
  order = np.random.default_rng(0).permutation(len(shade))  # no shade is always on top
  for axes in grid[len(panels):]:
    axes.set_axis_off()
  for axes, (name, points) in zip(grid, panels.items()):
    # As pixels: a mark a point makes a page of many models too large.
    drawn = axes.scatter(*points[order].T, c=np.asarray(shade)[order], s=4, linewidths=0, norm=norm, cmap=POINT_COLORS,
                         rasterized=True)
    axes.set_title(name, loc='left', fontsize=8.5, fontweight='normal', parse_math=False)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=plots.FAINT)
    axes.set_aspect('equal', adjustable='datalim')
  bar = figure.colorbar(drawn, ax=list(grid), label=label, location='bottom', aspect=40, pad=0.02)
  bar.ax.xaxis.set_major_formatter(plots.plain_number)
  return figure
