"""Figures show the numbers they were given, and their SVG can stand in a page among others."""

import re

import matplotlib
import numpy as np
import pytest

from lns_jax.depth import plots, plots_maps, plots_steps, svg
from lns_jax.depth.plots import Band, Line


def _triangle(L):
  values = np.arange(1.0, L * L + 1).reshape(L, L) / (L * L)
  values[np.arange(L)[:, None] + np.arange(L) >= L] = np.nan
  return values


@pytest.mark.parametrize('L', [2, 4, 40])
def test_heat_map_shows_raw_values_and_leaves_cells_outside_the_model_blank(L):
  image = plots_maps.heat_map(_triangle(L), range(1, L + 1)).axes[0].images[0]
  shown = image.get_array()
  assert (~shown.mask).sum() == L * (L + 1) // 2
  np.testing.assert_array_equal(shown.filled(np.nan), _triangle(L))
  assert image.cmap(np.ma.masked)[3] == 0
  assert image.get_extent() == [0.5, L + 0.5, 0.5, L + 0.5] and image.origin == 'lower'


def test_heat_maps_that_share_a_top_share_their_colours():
  small, large = _triangle(3) / 10, _triangle(3)
  clims = {plots_maps.heat_map(v, [1, 2, 3], top=0.9).axes[0].images[0].get_clim() for v in (small, large)}
  assert clims == {(0, 0.9)}
  assert plots_maps.heat_map(np.zeros((2, 2)), [1, 2]).axes[0].images[0].get_clim() == (0, 1)


def test_rows_are_clipped_at_percentiles_and_stretched_each_for_itself():
  nan = np.nan
  raw = np.array([[1.0, 3, 2], [5, 9, nan], [4, nan, nan]])
  before = raw.copy()
  # Linear percentiles of (1, 2, 3): 1.02 and 2.98, so that 2 stays in the middle; one value has no spread.
  np.testing.assert_allclose(plots_maps.by_row_percentile(raw), [[0, 1, 0.5], [0, 1, nan], [nan, nan, nan]])
  np.testing.assert_array_equal(raw, before)
  hundred = plots_maps.by_row_percentile([np.arange(101.0), 1e-3 * np.arange(101.0) + 7])  # percentiles 1 and 99
  np.testing.assert_allclose(hundred[:, [0, 1, 2, 50, 99, 100]], [[0, 0, 1 / 98, 0.5, 1, 1]] * 2, atol=1e-9)
  assert np.isnan(plots_maps.by_row_percentile([[3.0, 3.0, None]])).all()


def test_squares_that_share_limits_share_their_colours():
  clim = lambda **kwargs: plots_maps.square([[1.0, 0.2], [0.2, 1.0]], **kwargs).axes[0].images[0].get_clim()
  assert clim(shown=(-0.5, 2)) == (-0.5, 2) and clim() == (0.2, 1)
  assert clim(diverging=True, shown=(-0.5, 2)) == pytest.approx((-1, 1))


def test_points_are_where_and_of_the_shade_that_they_were_given():
  rng = np.random.default_rng(0)
  panels, shade = {'a': rng.normal(size=(50, 2)), 'b': rng.normal(size=(50, 2))}, np.arange(1.0, 51)
  figure = plots_maps.scatters(panels, shade, log=True, label='how often')
  for axes, points in zip(figure.axes, panels.values()):
    drawn = axes.collections[0]
    back = np.argsort(drawn.get_array())
    np.testing.assert_array_equal(drawn.get_offsets()[back], points)
    assert drawn.get_clim() == (1, 50) and isinstance(drawn.norm, matplotlib.colors.LogNorm)
  assert [axes.get_title('left') for axes in figure.axes[:2]] == ['a', 'b']
  assert figure.axes[-1].get_xlabel() == 'how often'


@pytest.mark.parametrize('panels', [1, 3, 6])
def test_a_picture_of_many_points_stays_small(panels):
  points = np.random.default_rng(0).normal(size=(800, 2))
  figure = plots_maps.scatters({str(i): points for i in range(panels)}, np.arange(1, 801))
  text = svg.element(figure, 'x')
  assert text.count('<image') == panels + 1 and text.count('<use') < 50 and len(text) < 60_000 * panels


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
  axes = plots_steps.layers_over_steps([1, 2, 3, 4, 5], values, range(1, L + 1), 'v').axes[0]
  assert len(axes.lines) == 1 + min(L, plots.MAX_LINES)
  np.testing.assert_array_equal(axes.lines[0].get_ydata(), values[:, 0])
  np.testing.assert_array_equal(axes.lines[1].get_ydata(), values[:, 1])
  np.testing.assert_array_equal(axes.lines[-1].get_ydata(), values[:, L])


def test_one_line_an_update_from_the_embedding_on_with_its_real_number():
  values = [[1.0, 2, 3], [2, 4, 6]]
  figure = plots_steps.by_layer_at_steps([20, 1500], values, [1, 4], 'v', shown=(0.5, 9))
  axes = figure.axes[0]
  assert [line.get_ydata().tolist() for line in axes.lines] == values
  assert [line.get_xdata().tolist() for line in axes.lines] == [[0, 1, 2]] * 2
  assert [t.get_text() for t in figure.legends[0].get_texts()] == ['update 20', 'update 1,500']
  assert [t.get_text() for t in axes.get_xticklabels()] == ['emb', '1', '4']
  assert axes.get_ylim()[0] < 0.5 and axes.get_ylim()[1] > 9


def test_a_model_keeps_its_colour_when_another_has_no_curve():
  line = Line([1, 2], [3.0, 2.0])
  both = plots_steps.over_steps({'a': line, 'b': line}, 'loss').axes[0].lines[1]
  alone = plots_steps.over_steps({'a': None, 'b': line}, 'loss').axes[0].lines[0]
  assert both.get_color() == alone.get_color() == plots.COLORS[1]


def test_twelve_models_look_different():
  assert len({str(plots.look(i)) for i in range(12)}) == 12


def test_long_histories_are_thinned_and_keep_both_ends():
  n = 10_000
  line = plots_steps.over_steps({'a': Line(np.arange(n), np.arange(n, 0.0, -1))}, 'loss').axes[0].lines[0]
  assert len(line.get_xdata()) == plots.MAX_POINTS and line.get_xdata()[[0, -1]].tolist() == [0, n - 1]


@pytest.mark.parametrize('values, scale', [([0.01, 10.0], 'log'), ([1.0, 2.0], 'linear'), ([-1.0, 100.0], 'linear')])
def test_the_axis_is_logarithmic_when_positive_values_range_widely(values, scale):
  assert plots.by_layer({'a': Band(values)}, [1, 2], 'v').axes[0].get_yscale() == scale


def test_models_of_different_depth_start_at_the_same_layer():
  axes = plots.by_layer({'a': Band([1.0, 2.0, 3.0]), 'b': Band([1.0, 2.0])}, [1, 2], 'v', embedding=True).axes[0]
  assert [line.get_xdata().tolist() for line in axes.lines] == [[0, 1, 2], [0, 1]]


def _svg(label='a picture', names=('a', 'b')):
  return svg.element(plots_steps.over_steps({n: Line([1, 2], [3.0, 2.0]) for n in names}, 'loss'), label)


def test_svg_scales_names_itself_and_keeps_text_as_text():
  text = _svg('a "b" <c>')
  assert text.startswith('<svg') and 'aria-label="a &quot;b&quot; &lt;c&gt;"' in text and 'role="img"' in text
  assert not re.search(r'<svg[^>]*(width|height)=', text)
  assert '>optimizer update</text>' in text


def test_svg_is_the_same_every_time_and_asks_for_nothing():
  assert _svg() == _svg()
  both = _svg() + svg.element(plots_maps.heat_map(_triangle(3), [1, 2, 3]), 'h')
  links = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', both)
  assert links and all((a or b).startswith(('#', 'data:')) for a, b in links)


def test_two_svgs_of_one_page_share_no_id_that_differs():
  pieces = [dict(re.findall(r'id="([^"]+)"[^>]*>\s*(.*)', _svg(label))) for label in ('one', 'two')]
  assert pieces[0] and not pieces[0].keys() & pieces[1].keys()


def test_names_are_drawn_as_they_are():
  text = _svg(names=('_hidden', '$a_b$', '<i>&'))
  assert all(f'>{name}</text>' in text for name in ('_hidden', '$a_b$', '&lt;i&gt;&amp;'))
