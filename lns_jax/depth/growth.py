"""Which law the variance follows with depth: linear, power or exponential in l, or none that the layers tell apart."""

import dataclasses

import numpy as np

from lns_jax.depth.estimate import Estimate
from lns_jax.errors import UserError

# A law is ruled out when the layers are exp(RULED_OUT / 2), about 150 times likelier under the best one:
# tests/depth/test_growth.py simulates how often a wrong law is then named.
RULED_OUT = 10.0
FLOOR = 1e-9  # relative error that counts as none


@dataclasses.dataclass(frozen=True)
class Law:
  """A fitted law of two numbers. Intervals are over sequences; how far the layers are from the law is `error`.

  Attributes:
    parameters: the law's numbers by name.
    curve: [L], the variance after layers 1..L by this law.
    error: [], root mean square over layers of log(variance / curve).
    behind: [], twice the log-likelihood by which the layers favour the best law over this one.
  """

  parameters: dict[str, Estimate]
  curve: np.ndarray
  error: Estimate
  behind: Estimate

  @property
  def ruled_out(self) -> bool:
    """Whether the best law is clearly better, also at the lower end of the interval over sequences."""
    least = self.behind.value if np.isnan(self.behind.low) else min(self.behind.value, self.behind.low)
    return bool(least >= RULED_OUT)


@dataclasses.dataclass(frozen=True)
class Growth:
  """The fitted laws by name, the one with the least error first."""

  laws: dict[str, Law]

  @property
  def told_apart(self) -> bool:
    """Whether all laws but the best are ruled out."""
    return all(law.ruled_out for law in list(self.laws.values())[1:])

  @property
  def law(self) -> str | None:
    """Name of the law that the variance follows; None where it could be one of several."""
    return next(iter(self.laws)) if self.told_apart else None

  def sentence(self) -> str:
    """What can be said of the law, with the typical error of all three."""
    left = [_described(name, law) for name, law in self.laws.items() if not law.ruled_out]
    out = ' and '.join(f'{name} ({_off(law)})' for name, law in self.laws.items() if law.ruled_out)
    if self.told_apart:
      said = f'The variance after layer l is {left[0]}'
    else:
      said = f'The layers do not tell apart {", ".join(left[:-1])} and {left[-1]}'
    return f'{said}; ruled out: {out}.' if out else f'{said}.'

  def record(self) -> dict:
    """The laws as plain values: name -> 'parameters', each [value, low, high], 'curve', 'error', 'ruled_out'."""
    return {name: {'parameters': {k: [float(v) for v in (e.value, e.low, e.high)] for k, e in law.parameters.items()},
                   'curve': law.curve.tolist(), 'error': float(law.error.value), 'ruled_out': law.ruled_out}
            for name, law in self.laws.items()}


def _off(law: Law) -> str:
  percent = 100 * np.expm1(law.error.value)
  return f'off by {percent:.2g}%' if percent >= 0.1 else 'off by less than 0.1%'


def _described(name: str, law: Law) -> str:
  """The fitted law, with the interval of its second number where there is one."""
  (_, a), (key, k) = law.parameters.items()
  formula = FORMULAS[name].format(a=a.value, k=k.value, sign='-' if k.value < 0 else '+', size=abs(k.value))
  between = '' if np.isnan(k.low) else f', {key} from {k.low:.3g} to {k.high:.3g}'
  return f'{formula} ({name}{between}, {_off(law)})'


def _line(x: np.ndarray, y: np.ndarray):
  """Least squares of y [R, L] on x [L]: (intercept [R], slope [R], fitted [R, L])."""
  x_c = x - x.mean()
  slope = y @ x_c / (x_c @ x_c)
  intercept = y.mean(axis=1) - slope * x.mean()
  return intercept, slope, intercept[:, None] + slope[:, None] * x


def _linear(l, y):
  """v = a + b l by least squares on log v: v ~ 1 + (e^u - 1) x, x from 0 to 1, with u the log of last over first."""
  x = (l - l[0]) / (l[-1] - l[0])
  def curve(u):  # [R, G] -> [R, G, L]: the shape, at the scale that fits best
    shape = np.log1p(np.expm1(u)[..., None] * x)
    return shape + np.mean(y[:, None] - shape, axis=-1, keepdims=True)
  u, width = np.zeros((len(y), 1)), 20.0
  while width > 1e-9:
    grid = u + np.linspace(-width, width, 81)
    u = np.take_along_axis(grid, np.sum((curve(grid) - y[:, None]) ** 2, axis=-1).argmin(axis=1)[:, None], axis=1)
    width /= 20
  fitted = curve(u)[:, 0]
  first, last = np.exp(fitted[:, 0]), np.exp(fitted[:, -1])
  b = (last - first) / (l[-1] - l[0])
  return {'a': first - b * l[0], 'b': b}, fitted


def _power(l, y):
  """v = a l^p."""
  a, p, fitted = _line(np.log(l), y)
  return {'a': np.exp(a), 'p': p}, fitted


def _exponential(l, y):
  """v = a e^(r l)."""
  a, r, fitted = _line(l, y)
  return {'a': np.exp(a), 'r': r}, fitted


LAWS = {'linear': _linear, 'power': _power, 'exponential': _exponential}
FORMULAS = {'linear': '{a:.3g} {sign} {size:.3g} l', 'power': '{a:.3g} l^{k:.3g}',
            'exponential': '{a:.3g} e^({k:.3g} l)'}


def _estimate(each: np.ndarray, tokens: float) -> Estimate:
  without = np.float64(np.nan)
  return Estimate.of(each, tokens) if len(each) > 1 else Estimate(each[0], without, without, tokens)


def _independent(residual: np.ndarray) -> float:
  """To how many independent layers the residuals [L] of the best law amount: L (1 - r) / (1 + r), r their lag-1
  correlation. What one layer adds stays in all that follow, so that neighbours miss a law together.

  Never fewer than 4, so that an error 3.5 times smaller decides, however smoothly the best law is missed.
  """
  r = max(residual[1:] @ residual[:-1] / max(residual @ residual, FLOOR ** 2), 0.0)
  return max(len(residual) * (1 - r) / (1 + r), 4.0)


def growth(variance, tokens: float = np.nan) -> Growth:
  """Fits v = a + b l, v = a l^p and v = a e^(r l) to the variance after layers l = 1..L, and compares them.

  Each is least squares on log v: variances span orders of magnitude, and on v itself the last layers would decide
  alone. All three have two numbers, so that their errors can be compared as they are. The embedding, l = 0, is left
  out: no layer made it, and a l^p is 0 there. Where the stream starts from much of its variance, p is that of the
  layers at hand, and less than it would be in the end.

  Errors are taken as normal in log v, and neighbouring layers as worth less than independent ones, by how correlated
  the errors of the best law are.

  Args:
    variance: [L + 1], or [1 + R, L + 1] with bootstrap replicates behind it as of `Mean.each`, for intervals. l is the
      number of layers passed, also in a model that had layers removed.
    tokens: behind the variance.

  Raises:
    UserError: fewer than 4 layers, or a variance that is not finite and above 0.
  """
  v = np.atleast_2d(np.asarray(variance, np.float64))[:, 1:]
  L = v.shape[1]
  if L < 4:
    raise UserError(f'a law of growth needs the variance after at least 4 layers, but there are {L}.')
  if not (np.isfinite(v) & (v > 0)).all():
    layer = 1 + int(np.argmin((np.isfinite(v) & (v > 0)).all(axis=0)))
    raise UserError(f'the variance after layer {layer} is {v[0, layer - 1]}: a law of growth needs it above 0.')
  y = np.log(v)
  fits = {name: fit(np.arange(1, L + 1.0), y) for name, fit in LAWS.items()}
  square = {name: np.mean((y - fitted) ** 2, axis=1) + FLOOR ** 2 for name, (_, fitted) in fits.items()}
  order = sorted(LAWS, key=lambda name: square[name][0])
  independent = _independent((y - fits[order[0]][1])[0])
  def law(name):
    parameters, fitted = fits[name]
    behind = independent * np.log(square[name] / square[order[0]])
    return Law({k: _estimate(each, tokens) for k, each in parameters.items()}, np.exp(fitted[0]),
               _estimate(np.sqrt(square[name]), tokens), _estimate(behind, tokens))
  return Growth({name: law(name) for name in order})
