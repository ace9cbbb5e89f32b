"""Figures show the numbers they were given, and their SVG can stand in a page among others."""

import re

import numpy as np
import pytest

from lns_jax.depth import plots
from lns_jax.depth.plots import Band, Line


def _triangle(L):
  values = np.arange(1.0, L * L + 1).reshape(L, L) / (L * L)
  values[np.arange(L)[:, None] + np.arange(L) >= L] = np.nan
  return values


@pytest.mark.parametrize('L', [2, 4, 40])
def test_heat_map_shows_raw_values_and_leaves_cells_outside_the_model_blank(L):
  image = plots.heat_map(_triangle(L), range(1, L + 1)).axes[0].images[0]
  shown = image.get_array()
  assert (~shown.mask).sum() == L * (L + 1) // 2
  np.testing.assert_array_equal(shown.filled(np.nan), _triangle(L))
  assert image.cmap(np.ma.masked)[3] == 0
  assert image.get_extent() == [0.5, L + 0.5, 0.5, L + 0.5] and image.origin == 'lower'


def test_heat_maps_that_share_a_top_share_their_colours():
  small, large = _triangle(3) / 10, _triangle(3)
  clims = {plots.heat_map(v, [1, 2, 3], top=0.9).axes[0].images[0].get_clim() for v in (small, large)}
  assert clims == {(0, 0.9)}
  assert plots.heat_map(np.zeros((2, 2)), [1, 2]).axes[0].images[0].get_clim() == (0, 1)


def test_bars_are_as_high_as_the_rise_and_carry_the_layers_own_numbers():
  axes = plots.removal_bars(Band([30.0, -0.2, 0.5], [29.0, -0.3, 0.4], [31.0, -0.1, 0.6]), [1, 2, 4]).axes[0]
  assert [bar.get_height() for bar in axes.patches] == [30.0, -0.2, 0.5]
  assert [t.get_text() for t in axes.get_xticklabels()] == ['1', '2', '4']
  bottom, top = axes.get_ylim()
  assert bottom < -0.3 and top > 31


def test_losses_of_accuracy_hang_down_on_an_axis_that_figures_share():
  bars = lambda values, shown: plots.change_bars(Band(values, values, values), [1, 2, 4], shown=shown).axes[0]
  axes, other = bars([-30.0, 2.0, -0.5], (-30.0, 5.0)), bars([-1.0, 5.0, 0.0], (-30.0, 5.0))
  assert [bar.get_height() for bar in axes.patches] == [-30.0, 2.0, -0.5]
  assert axes.get_ylim() == other.get_ylim() and axes.get_ylim()[0] < -30 and axes.get_yscale() == 'linear'
  assert bars([-3.0, -2.0, -1.0], None).get_ylim()[1] > 0  # zero is always shown


@pytest.mark.parametrize('L', [2, 16, 96])
def test_one_line_a_layer_and_one_for_the_embedding(L):
  values = np.cumsum(np.ones((5, L + 1)), axis=1)
  axes = plots.layers_over_steps([1, 2, 3, 4, 5], values, range(1, L + 1), 'v').axes[0]
  assert len(axes.lines) == 1 + min(L, plots.MAX_LINES)
  np.testing.assert_array_equal(axes.lines[0].get_ydata(), values[:, 0])
  np.testing.assert_array_equal(axes.lines[1].get_ydata(), values[:, 1])
  np.testing.assert_array_equal(axes.lines[-1].get_ydata(), values[:, L])


def test_a_model_keeps_its_colour_when_another_has_no_curve():
  line = Line([1, 2], [3.0, 2.0])
  both = plots.over_steps({'a': line, 'b': line}, 'loss').axes[0].lines[1]
  alone = plots.over_steps({'a': None, 'b': line}, 'loss').axes[0].lines[0]
  assert both.get_color() == alone.get_color() == plots.COLORS[1]


def test_twelve_models_look_different():
  assert len({str(plots.look(i)) for i in range(12)}) == 12


def test_long_histories_are_thinned_and_keep_both_ends():
  n = 10_000
  line = plots.over_steps({'a': Line(np.arange(n), np.arange(n, 0.0, -1))}, 'loss').axes[0].lines[0]
  assert len(line.get_xdata()) == plots.MAX_POINTS and line.get_xdata()[[0, -1]].tolist() == [0, n - 1]


@pytest.mark.parametrize('values, scale', [([0.01, 10.0], 'log'), ([1.0, 2.0], 'linear'), ([-1.0, 100.0], 'linear')])
def test_the_axis_is_logarithmic_when_positive_values_range_widely(values, scale):
  assert plots.by_layer({'a': Band(values)}, [1, 2], 'v').axes[0].get_yscale() == scale


def test_models_of_different_depth_start_at_the_same_layer():
  axes = plots.by_layer({'a': Band([1.0, 2.0, 3.0]), 'b': Band([1.0, 2.0])}, [1, 2], 'v', embedding=True).axes[0]
  assert [line.get_xdata().tolist() for line in axes.lines] == [[0, 1, 2], [0, 1]]


def _svg(label='a picture', names=('a', 'b')):
  return plots.svg(plots.over_steps({n: Line([1, 2], [3.0, 2.0]) for n in names}, 'loss'), label)


def test_svg_scales_names_itself_and_keeps_text_as_text():
  text = _svg('a "b" <c>')
  assert text.startswith('<svg') and 'aria-label="a &quot;b&quot; &lt;c&gt;"' in text and 'role="img"' in text
  assert not re.search(r'<svg[^>]*(width|height)=', text)
  assert '>optimizer update</text>' in text


def test_svg_is_the_same_every_time_and_asks_for_nothing():
  assert _svg() == _svg()
  both = _svg() + plots.svg(plots.heat_map(_triangle(3), [1, 2, 3]), 'h')
  links = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', both)
  assert links and all((a or b).startswith(('#', 'data:')) for a, b in links)


def test_two_svgs_of_one_page_share_no_id_that_differs():
  pieces = [dict(re.findall(r'id="([^"]+)"[^>]*>\s*(.*)', _svg(label))) for label in ('one', 'two')]
  assert pieces[0] and not pieces[0].keys() & pieces[1].keys()


def test_names_are_drawn_as_they_are():
  text = _svg(names=('_hidden', '$a_b$', '<i>&'))
  assert all(f'>{name}</text>' in text for name in ('_hidden', '$a_b$', '&lt;i&gt;&amp;'))
