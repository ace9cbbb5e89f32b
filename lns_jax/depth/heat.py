"""The token-averaged Jacobian of a block, the paper's Figure 5: the mean over tokens t of dy_t / dx_t, [D, D]."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from lns_jax.config import ModelConfig
from lns_jax.depth import finite
from lns_jax.depth.estimate import Estimate
from lns_jax.depth.jacobian import Streams, numbered
from lns_jax.depth.spectral import check_probes, enough, mean_over_probes
from lns_jax.depth.states import keys_of
from lns_jax.errors import UserError
from lns_jax.models import layout

GROUPS = 10
PANELS = 5  # heat maps of Figure 5


class Grouped:
  """sum / weight of matrices, for which the replicates of `estimate.Mean` would take 500 times their memory.

  Sequences fall into GROUPS groups in turn. The interval is Student's t, with the standard error of a jackknife that
  leaves out one group at a time. Float64, GROUPS times the memory of the mean. One sequence has no interval: NaN.
  """

  def __init__(self):
    self._sums = [0.0] * GROUPS
    self._weights = np.zeros(GROUPS)
    self.sequences = 0

  def add(self, sums: np.ndarray, weights: np.ndarray):
    """sums: [B, ...]. weights: [B]; a sequence of weight 0 counts as none."""
    for one, weight in zip(sums, weights):
      if weight:
        group = self.sequences % GROUPS
        self._sums[group] = self._sums[group] + one.astype(np.float64)
        self._weights[group] += weight
        self.sequences += 1

  @property
  def weight(self) -> float:
    return float(np.sum(self._weights))

  def estimate(self, function: Callable[[np.ndarray], np.ndarray] = lambda mean: mean) -> Estimate:
    """A function of the mean."""
    total = sum(self._sums)
    value, G = function(total / self.weight), min(self.sequences, GROUPS)
    if G < 2:
      return Estimate(value, np.full_like(value, np.nan), np.full_like(value, np.nan), self.weight)
    first = second = 0.0
    for one, weight in zip(self._sums[:G], self._weights[:G]):
      with np.errstate(invalid='ignore'):  # of infinite values
        moved = function((total - one) / (self.weight - weight)) - value
      first, second = first + moved, second + np.square(moved)
    error = np.sqrt(np.maximum(second - np.square(first) / G, 0.0) * (G - 1) / G)
    half = stats.t.ppf(0.975, G - 1) * error
    return Estimate(value, value - half, value + half, self.weight)

  @property
  def quantile(self) -> float:
    """Half the interval's width in standard errors; NaN without an interval."""
    return float(stats.t.ppf(0.975, min(self.sequences, GROUPS) - 1))


@functools.partial(jax.jit, static_argnums=(0, 6))
def _sums(config: ModelConfig, params, batch, positions, seed, first, probes: int):
  """([B, N, D, D] sums over the tokens of each sequence of dy_t / dx_t in the layers at N positions, tokens [B])."""
  s = Streams.of(config, params, batch)
  B, T, D = s.before.shape[1:]
  keys = keys_of(seed, first, B)
  def of_layer(i):
    push = s.block(i).push
    def column(d):
      # Every token's x_d moves at once, up or down at random; read with the same sign, others' effects average out.
      draw = lambda key: jax.random.rademacher(jax.random.fold_in(key, d), (T, 1), s.before.dtype)
      flips = s.kept(jax.vmap(draw)(keys))
      moved = lambda z: jnp.sum(z * push(z * jax.nn.one_hot(d, D, dtype=z.dtype)), axis=1)
      return mean_over_probes(moved, flips, enough(probes, T))
    return jax.lax.map(column, jnp.arange(D))
  return jnp.transpose(jax.lax.map(of_layer, positions), (2, 0, 3, 1)), jnp.sum(s.real, axis=(1, 2))


def panels(config: ModelConfig) -> tuple[int, ...]:
  """Ids of PANELS layers, the first, the last and evenly between; of all layers where there are no more."""
  L = config.num_layers
  return tuple(config.layer_ids[i] for i in np.unique(np.linspace(0, L - 1, PANELS).round().astype(int)))


def split(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(mean over the diagonal, mean off it) of [..., D, D]."""
  D = matrices.shape[-1]
  diagonal = np.trace(matrices, axis1=-2, axis2=-1)
  return diagonal / D, (matrices.sum(axis=(-2, -1)) - diagonal) / (D * (D - 1))


def dominance(matrices: np.ndarray) -> np.ndarray:
  """Mean |diagonal| over mean |off-diagonal| of [..., D, D]; infinite where there is nothing off the diagonal."""
  on, off = split(np.abs(matrices))
  with np.errstate(divide='ignore'):
    return on / off


def mean_jacobian(config: ModelConfig, params, batches, *, layers: tuple[int, ...] | None = None, probes: int = 1,
                  seed: int = 0) -> dict[str, Estimate]:
  """Token-averaged Jacobians of N layers, the heat maps of Figure 5, through one compiled program.

  What other tokens do to a token is not in it. It is estimated for all tokens at once by D products with vectors of
  random signs a probe: unbiased, its noise smaller by the root of probes, tokens and sequences, and part of every
  interval, since each sequence has signs of its own. Averaged over sequences before its size is taken, so that its
  singular values are not means of those of single tokens.

  Args:
    layers: the layers' own ids; five spread over the depth by default.
    probes: vectors of signs, a power of two; with T of them or more there is no noise. More sequences are worth more.
    seed: of the signs.

  Returns:
    'jacobian' [N, D, D]: entry [i, d] is the mean of dy_i / dx_d. 'singular_values' [N, D], largest first.
    'dominance' [N]: mean |diagonal| over mean |off-diagonal|.
    'noise' [N]: mean standard error of off-diagonal entries over mean |off-diagonal|. Near sqrt(pi / 2) = 1.25 where
    nothing but noise is off the diagonal, which makes dominance a lower bound and small singular values too large.
    Intervals are a jackknife's, see `Grouped`; NaN for one sequence, and for 'noise'.

  Raises:
    UserError: no batch, no real token, a layer that the model does not have, a number of probes that cannot be, or a
    Jacobian that is not finite.
  """
  check_probes(probes)
  layers = panels(config) if layers is None else tuple(layers)
  for l in layers:
    if l not in config.layer_ids:
      raise UserError(f'the model has no layer {l}; its layers are {layout.run_name(config.layer_ids)}.')
  positions = np.array([config.layer_ids.index(l) for l in layers], np.int32)
  params, mean, tokens = layout.stack(params, config), Grouped(), None
  for first, batch in numbered(batches):
    sums, tokens = jax.device_get(_sums(config, params, batch, positions, seed, first, probes))
    bad = np.argwhere(~np.isfinite(sums).all(axis=(2, 3)) & (tokens > 0)[:, None])
    if len(bad):
      finite.check_weights(params)
      raise UserError(f'the Jacobian of layer {layers[bad[0][1]]} is not finite in sequence {first + bad[0][0]}.')
    mean.add(sums, tokens)
  if tokens is None:
    raise UserError('there are no batches to measure on.')
  if not mean.sequences:
    raise UserError('no valid tokens: every one is padding.')
  matrices = mean.estimate()
  error = (matrices.high - matrices.low) / 2 / mean.quantile
  with np.errstate(invalid='ignore'):
    noise = split(error)[1] / split(np.abs(matrices.value))[1]
  blank = np.full_like(noise, np.nan)
  return {'jacobian': matrices, 'dominance': mean.estimate(dominance),
          'singular_values': mean.estimate(lambda m: np.linalg.svd(m, compute_uv=False)),
          'noise': Estimate(noise, blank, blank, mean.weight)}
