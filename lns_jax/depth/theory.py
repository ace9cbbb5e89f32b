"""The paper's theory of depth (arXiv 2502.05795, sections 3 and 4, appendix A) as functions, in numpy float64.

The symbols are the paper's: x_1 is the embedding and x_l what enters layer l, so that an array by layer starts at l = 1
and a measured variance [L + 1] is that of x_1, ..., x_(L + 1). Products are given as natural logarithms: with a model's
own constants they leave float64. docs/theory.md shows which of the statements follow from these formulas.
"""

import dataclasses

import jax
import numpy as np
from scipy import special

from lns_jax.config import ModelConfig
from lns_jax.errors import UserError
from lns_jax.layers import param, schemes
from lns_jax.models import layout


def _literal(start: float, factors) -> np.ndarray:
  """v_1 = start, v_(k + 1) = v_k (1 + factors_k / sqrt(v_k))."""
  v = [float(start)]
  for factor in factors:
    v.append(v[-1] + factor * v[-1] ** 0.5)
  return np.array(v)


def lemma_3_2(L: int, start: float = 1.0) -> np.ndarray:
  """sigma_x_l^2, l = 1..L, by the recursion of Lemma 3.2 (Pre-LN) without its Theta: v_(k+1) = v_k (1 + 1/sigma_k)."""
  return _literal(start, np.ones(L - 1))


def lemma_4_1(L: int, start: float = 1.0) -> np.ndarray:
  """sigma_x_l^2, l = 1..L, by that of Lemma 4.1 (LNS): v_(k+1) = v_k (1 + 1/(sqrt(k) sigma_k)); from 1 it is l."""
  return _literal(start, np.arange(1, L) ** -0.5)


def lemma_3_2_range(L: int, start: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
  """Theta(l) and Theta(exp(l)), between which Lemma 3.2 has sigma_x_l^2; both scaled to `start` at l = 1."""
  l = np.arange(1, L + 1.0)
  return start * l, start * np.exp(l - 1)


def lemma_4_1_range(L: int, start: float = 1.0, eps: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
  """Theta(l) and Theta(l^(2 - eps)), 1/2 <= eps < 1, of Lemma 4.1; both scaled to `start` at l = 1."""
  l = np.arange(1, L + 1.0)
  return start * l, start * l ** (2 - eps)


def residual_variance(start: float, attn, ffn, rho_1: float = 0.0, rho_2: float = 0.0) -> np.ndarray:
  """Variance of x_1, ..., x_(n + 1) from those of the n layers' branches, the sum that Lemma 3.2 starts from.

  Var(x') = sigma_x^2 + sigma_Attn^2 + rho_1 sigma_x sigma_Attn, and the same with the FFN and rho_2 on top (A.1).

  Args:
    start: sigma_x_1^2. attn, ffn: [n], sigma_Attn^2 and sigma_FFN^2.
    rho_1, rho_2: twice the correlation of stream and branch: 0 under Assumption 3.1, at most 2.
  """
  v = [float(start)]
  for of_attn, of_ffn in np.broadcast(attn, ffn):
    middle = v[-1] + of_attn + rho_1 * (v[-1] * of_attn) ** 0.5
    v.append(middle + of_ffn + rho_2 * (middle * of_ffn) ** 0.5)
  return np.array(v)


def theorem_3_3(variance, A=1.0, B=1.0) -> np.ndarray:
  """Log of the bound on |dx_(l+1) / dx_1|_2 for Pre-LN: prod_(k <= l) (1 + A / sigma_x_k + B / sigma_x_k^2).

  Args:
    variance: [..., n], sigma_x_k^2, k = 1..n. A, B: numbers, or [n].
  """
  sigma = np.sqrt(variance)
  return np.cumsum(np.log1p(A / sigma + B / sigma ** 2), axis=-1)


def theorem_3_3_limit(A: float = 1.0, B: float = 1.0) -> float:
  """Log of M, which Theorem 3.3 prints as the bound's limit where sigma_x_l^2 ~ exp(l)."""
  e = np.e
  return A / (e - 1) + B / (e**2 - 1) - (A**2 / (e**2 - 1) + 2 * A * B / (e**3 - 1) + B**2 / (e**4 - 1)) / 2


def theorem_4_2(variance, A=1.0, B=1.0) -> np.ndarray:
  """As `theorem_3_3`, for LNS: prod_(k <= l) (1 + A / (k sigma_x_k) + B / (k^2 sigma_x_k^2))."""
  k = np.arange(1, np.shape(variance)[-1] + 1)
  return theorem_3_3(variance, np.divide(A, k), np.divide(B, k ** 2))


def theorem_4_3(variance, A_prime=1.0, B_prime=1.0) -> np.ndarray:
  """Log of the bound on |dx_(l+1) / dW_1|_2, W_1 the first layer's query weight: the product of `theorem_4_2`.

  Its constants are others, A' and B'; the text that this package knows the paper by does not give them.
  """
  return theorem_4_2(variance, A_prime, B_prime)


@dataclasses.dataclass(frozen=True)
class Constants:
  """What the bounds of Theorems 3.3 and 4.2 are made of, in the paper's symbols.

  Attributes:
    sigma: [L], standard deviation of the entries of each layer's matrices; or a number for all layers.
    pooled: that of all layers together.
    d, d_ffn, h, d_head: widths of the stream and of the MLP, number of heads and width of one.
    s: length of a sequence.
  """

  sigma: np.ndarray
  pooled: float
  d: int
  d_ffn: int
  h: int
  d_head: int
  s: int

  @property
  def ffn(self) -> np.ndarray:
    """sigma^2 (sqrt(d) + sqrt(d_ffn))^2, bound on the Jacobian of the paper's ReLU FFN (Lemma A.2)."""
    return self.sigma ** 2 * (self.d ** 0.5 + self.d_ffn ** 0.5) ** 2

  @property
  def attn(self) -> np.ndarray:
    """|W_O| |J^Z|, bound on the Jacobian of attention (Lemma A.2), also where h d_head is not d."""
    d, h, d_head, sigma = self.d, self.h, self.d_head, self.sigma
    softmax = (self.s ** 0.5 + 2 + self.s ** -0.5) * sigma ** 3 * (d ** 3 * d_head) ** 0.5
    J_Z = h * (softmax + sigma * (d ** 0.5 + d_head ** 0.5))
    return sigma * (d ** 0.5 + (h * d_head) ** 0.5) * J_Z

  @property
  def A(self) -> np.ndarray:
    """Coefficient of 1 / sigma_x in (1 + ffn / sigma_x) (1 + attn / sigma_x), which Lemma A.2 bounds a layer by."""
    return self.ffn + self.attn

  @property
  def B(self) -> np.ndarray:
    """Coefficient of 1 / sigma_x^2 in the same product."""
    return self.ffn * self.attn

  @property
  def printed(self) -> tuple[np.ndarray, np.ndarray]:
    """A and B as the paper prints them: A without the sigma^2 that its last part needs, B without the FFN."""
    d, h, sigma = self.d, self.h, self.sigma
    softmax = (self.s ** 0.5 + 2 + self.s ** -0.5) * sigma ** 2 * d * self.d_head ** 0.5
    return self.ffn + 2 * d * h * (softmax + 1 + (self.d_head / d) ** 0.5), 2 * d * h * sigma ** 2 * softmax


# What reads the output of each sub-layer's norm.
_READERS = {'attn': ('q', 'k', 'v'), 'mlp': ('gate', 'up')}


def _matrices(layer: dict):
  """(path, matrix) of a layer. The paper's norm has no gain: a model's gain belongs to what reads the norm."""
  for sub, readers in _READERS.items():
    gain = np.asarray(layer.get(f'{sub}_in_norm', {}).get('gain', 1.0), np.float64)
    for name, w in layer[sub].items():
      if getattr(w, 'ndim', 0) >= 2:
        w = np.asarray(param.dense(w)).astype(np.float64)
        yield f'{sub}/{name}', w * gain.reshape(gain.shape + (1,) * (w.ndim - 1)) if name in readers else w


def constants(config: ModelConfig, params, s: int) -> Constants:
  """The paper's constants, sigma measured on the model's own matrices, with the gains of their norms in them.

  A factor of the scheme (1/sqrt(l)) is not in sigma. Assumption 3.1 gives all matrices one sigma; here each layer has
  its own, over the entries of attention and MLP together.

  Args:
    s: length of the sequences.

  Raises:
    UserError: a weight is not finite, naming its tensor.
  """
  numbers, means, squares = [], [], []
  layers = layout.unstack(jax.device_get(params))['layers']
  for l in config.layer_ids:
    found = []
    for path, w in _matrices(layers[str(l)]):
      found.append((w.size, w.mean(), np.square(w).mean()))
      if not np.isfinite(found[-1]).all():
        raise UserError(f'layers/{l}/{path} has a weight that is not finite: no sigma can be measured on it.')
    n, mean, square = np.array(found).T
    numbers.append(n.sum())
    means.append(n @ mean / n.sum())
    squares.append(n @ square / n.sum())
  std = lambda mean, square: np.sqrt(square - mean ** 2)
  pooled = std(np.average(means, weights=numbers), np.average(squares, weights=numbers))
  return Constants(std(np.array(means), np.array(squares)), float(pooled), config.d_model, config.d_ff,
                   config.num_heads, config.head_dim, s)


def _factors(config: ModelConfig):
  """Factors in front of and behind the sub-layers f of every layer: s and b, each [2, L], attention first."""
  rows = [schemes.row(config, l) for l in config.layer_ids]
  of = [[schemes.factors(config, l)[sub] for l in config.layer_ids] for sub in schemes.SUBLAYERS]
  if (not all(r.in_norm and not (r.res_norm or r.out_norm or r.in_groups) for r in rows) or config.norm == 'dyt'
      or schemes.learns(config) or schemes.grows(config) or any(k.a != 1 or k.post != 1 for row in of for k in row)):
    raise UserError("the paper's theory is about a norm with statistics in front of each branch and constant factors, "
                    f"such as scheme 'pre' or 'lns' have; this model's scheme is {config.scheme!r}, its norm "
                    f'{config.norm!r}.')
  return tuple(np.array([[getattr(k, f) for k in row] for row in of]) for f in 'sb')


def _positive(variance) -> np.ndarray:
  variance = np.asarray(variance, np.float64)
  if not (np.isfinite(variance) & (variance > 0)).all():
    raise UserError(f'variances must be finite and above 0, but the smallest is {variance.min()}.')
  return variance


def log_jacobian_bound(config: ModelConfig, found: Constants, variance) -> np.ndarray:
  """Log of the bound on |dx_(l+1) / dx_1|_2, l = 1..L, at a model's own constants and measured variance.

  Theorem 3.3 for `pre`; Theorem 4.2 for `lns`, whose 1 / l is the square of its factor. With other factors each
  sub-layer's term is multiplied by s^2 b in the same way. sigma_x' is set to sigma_x, as in the paper.

  Args:
    variance: [..., L + 1], as `depth.variance` measures it.

  Returns:
    [..., L], natural logarithms.

  Raises:
    UserError: a scheme outside of the theory, or a variance that is not above 0.
  """
  s, b = _factors(config)
  sigma_x = np.sqrt(_positive(variance))[..., :-1]
  in_layer = (np.log1p(of * k / sigma_x) for of, k in zip((found.attn, found.ffn), s ** 2 * b))
  return np.cumsum(sum(in_layer), axis=-1)


def _hidden_square(kind: str, tau: np.ndarray) -> np.ndarray:
  """Mean square of a hidden unit of the MLP whose pre-activations are normal with standard deviation tau."""
  z, w = np.polynomial.hermite_e.hermegauss(80)
  u = z * np.asarray(tau)[..., None]
  mean = lambda values: values @ (w / w.sum())
  if kind == 'swiglu':
    return mean(np.square(u * special.expit(u))) * tau ** 2
  return mean(np.square(u * special.ndtr(u)))


def branch_variances(config: ModelConfig, found: Constants) -> tuple[np.ndarray, np.ndarray]:
  """(sigma_Attn^2, sigma_FFN^2), [L] each, of random matrices with the model's sigma, widths kept (A.1.1, A.1.2).

  Attention as in the paper: uniform softmax, and values that are not averaged out, so W_O of W_V of a unit vector. The
  MLP has the model's own activation, where the paper has sigma^4 for its ReLU.
  """
  s, b = _factors(config)
  into = s ** 2 * found.d * found.sigma ** 2  # variance of what W_V, W_gate and W_up return
  attn = found.h * found.d_head * found.sigma ** 2 * into[0]
  ffn = found.d_ffn * found.sigma ** 2 * _hidden_square(config.mlp, np.sqrt(into[1]))
  return b[0] ** 2 * attn, b[1] ** 2 * ffn


def predicted_variance(config: ModelConfig, found: Constants, start: float) -> dict[str, np.ndarray]:
  """Variance of x_1, ..., x_(L + 1), [L + 1], from the measured variance of the embedding.

  Returns:
    'lemma': the recursion of Lemma 3.2 or 4.1, without constants. 'independent': branches of random matrices with the
    model's sigma, uncorrelated with the stream, as Assumption 3.1 has it. 'aligned': the same branches in the direction
    of the stream, the most that branches of this size can give.

  Raises:
    UserError: as `log_jacobian_bound`.
  """
  s, b = _factors(config)
  attn, ffn = branch_variances(config, found)
  start = float(_positive(start))
  return {'lemma': _literal(start, (s * b)[0]), 'independent': residual_variance(start, attn, ffn),
          'aligned': residual_variance(start, attn, ffn, 2.0, 2.0)}
