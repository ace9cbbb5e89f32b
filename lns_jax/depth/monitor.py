"""Depth measures inside any JAX training loop, ours or another's, and a warning when the deep layers go idle."""

import json
import pathlib
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lns_jax import files
from lns_jax.depth.gradients import thirds
from lns_jax.depth.states import hidden_variance
from lns_jax.errors import UserError
from lns_jax.layers.norms import wide
from lns_jax.models import by_layer


class Monitor:
  """Measures depth while training: `measure` inside the jitted step, `update` outside.

  It warns once when the last third of the layers (L // 3 of them) is idle: when its share of the layers' decrease of
  the loss has been below `idle_below` in each of the last `patience` records. Equal shares would be 1/3. Records up to
  step `warmup` are kept but not judged, since shares there are those of the start, not of the model; nor are those
  without any decrease of all layers together (a rate of 0, say), or of fewer than three layers: each begins the count
  anew. With Adam a layer's decrease follows the size of its gradient: a fixed factor in front of a weight, such as
  that of LNS, makes both smaller without making the layer idle, so compare shares of different schemes with care.

  A loop of one's own:

  >>> import jax, jax.numpy as jnp, optax
  >>> from lns_jax import depth
  >>> def forward(params, x):
  ...   states = [x]
  ...   for layer in params['layers']:
  ...     states.append(states[-1] + jnp.tanh(states[-1] @ layer['in']) @ layer['out'])
  ...   return states[-1] @ params['head'], states
  >>> def loss(params, x, y):
  ...   prediction, states = forward(params, x)
  ...   return jnp.mean((prediction - y) ** 2), states
  >>> draw = lambda i, *shape: 0.1 * jax.random.normal(jax.random.key(i), shape)
  >>> params = {'layers': [{'in': draw(i, 8, 16), 'out': draw(i + 9, 16, 8)} for i in range(3)], 'head': draw(20, 8, 1)}
  >>> tx, monitor = optax.adam(1e-2), depth.Monitor(warmup=100)
  >>> @jax.jit
  ... def step(params, opt_state, x, y):
  ...   grads, states = jax.grad(loss, has_aux=True)(params, x, y)
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   metrics = monitor.measure(states=states, grads=grads, updates=updates)
  ...   return optax.apply_updates(params, updates), opt_state, metrics
  >>> opt_state, x = tx.init(params), draw(30, 4, 8)
  >>> for i in range(1, 4):
  ...   params, opt_state, metrics = step(params, opt_state, x, jnp.sum(x, axis=1, keepdims=True))
  ...   monitor.update(i, metrics)
  >>> {name: np.shape(value) for name, value in monitor.history[-1].items()}  # doctest: +NORMALIZE_WHITESPACE
  {'step': (), 'grad_norm': (), 'layer_decrease': (3,), 'layer_grad_norm': (3,), 'layer_ratio': (3,),
   'predicted_decrease': (), 'variance': (4,)}

  A model of this package:

  >>> import lns_jax
  >>> config = lns_jax.ModelConfig(scheme='lns', vocab_size=32, d_model=16, d_ff=32, num_layers=3, num_heads=2)
  >>> tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 32)
  >>> params = lns_jax.init(config, jax.random.key(1))
  >>> def loss(params):
  ...   logits = lns_jax.forward(config, params, tokens[:, :-1])
  ...   return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))
  >>> @jax.jit
  ... def step(params, opt_state):
  ...   grads, states = jax.grad(loss)(params), lns_jax.states(config, params, tokens[:, :-1])
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   metrics = monitor.measure(states=states, grads=grads, updates=updates)
  ...   return optax.apply_updates(params, updates), opt_state, metrics
  >>> params, opt_state, metrics = step(params, tx.init(params))
  >>> metrics['layer_decrease'].shape, metrics['variance'].shape
  ((3,), (4,))

  Attributes:
    history: records so far, {'step', measure: number or list}, as the lines of our metrics.jsonl.
    warned: the step of the warning, None before.
  """

  def __init__(self, layer_of: Callable[[str], by_layer.Place] = by_layer.layer_of, *,
               read: Callable = lambda outputs: outputs, path: str | pathlib.Path | None = None,
               idle_below: float = 0.1, patience: int = 10, warmup: int = 1000):
    """Settings.

    Args:
      layer_of: from the path of a leaf ('params/layers_7/mlp/kernel') to its layer, or None outside of the layers; or
        to the layers that its leading axis runs over, `itertools.count()` where their number is not known. The default
        knows the usual names, see `models.by_layer.layer_of`.
      read: from what `measure` gets as `states` to the states.
      path: a file that `update` appends a line of JSON to, by process 0 alone.
      idle_below, patience, warmup: when to warn, see above.
    """
    self.layer_of, self.read = layer_of, read
    self.path = None if path is None else pathlib.Path(path)
    self.idle_below, self.patience, self.warmup = idle_below, patience, warmup
    self.history, self.warned = [], None
    self._idle = []  # steps of the last records in a row with an idle last third

  def measure(self, *, states=None, mask=None, grads=None, updates=None) -> dict[str, jax.Array]:
    """Small arrays for `update`; pure, to be called inside jit. Layers are in the order of their numbers.

    Args:
      states: the residual stream, all of one shape [..., D]: an array [S, ..., D], a list in order, or a mapping whose
        paths name layers, the one outside of them (the embedding) first; or what `read` makes one of these of.
      mask: [...], 1 on tokens that count; all do by default.
      grads: gradient of the loss, before clipping, in the structure of the parameters.
      updates: what is added to the parameters; optax's sign.

    Returns:
      with states: 'variance' [S], over the hidden units of a token, averaged over tokens; 'layer_ratio' [S - 1], root
      mean square of what a layer adds over that of what enters it.
      with grads: 'grad_norm' [], 'layer_grad_norm' [L].
      with grads and updates: 'layer_decrease' [L], -(gradient . update), the decrease of the loss that the step brings
      to first order; 'predicted_decrease' [], the same of all parameters, so that their quotient is a share.

    Raises:
      UserError: no path names a layer, or grads and updates do not fit together.
    """
    found = {} if states is None else _of_states(self._in_order(self.read(states)), mask)
    if grads is not None:
      squares, whole = by_layer.sums(jnp.square, grads, layer_of=self.layer_of)
      found |= {'layer_grad_norm': jnp.sqrt(squares), 'grad_norm': jnp.sqrt(whole)}
    if updates is not None:
      if grads is None:
        raise UserError('updates need grads beside them: a decrease is the product of both.')
      layers, whole = by_layer.sums(lambda g, u: -g * u, grads, updates, layer_of=self.layer_of)
      found |= {'layer_decrease': layers, 'predicted_decrease': whole}
    return found

  def update(self, step: int, metrics: Mapping):
    """Keeps a record, writes it, and warns if the last third of the layers has gone idle.

    metrics: of `measure`, with whatever else is to be in the record, such as the loss; or a line of a metrics.jsonl.
    """
    record = {'step': int(step), **files.finite(jax.device_get(dict(metrics)))}
    self.history.append(record)
    if self.path is not None and not jax.process_index():
      self.path.parent.mkdir(parents=True, exist_ok=True)
      with self.path.open('a') as file:
        file.write(json.dumps(record) + '\n')
    if 'layer_decrease' in record and self.warned is None:
      self._judge(record['step'], np.array(record['layer_decrease'], float))

  def _judge(self, step: int, decrease: np.ndarray):
    L, share = len(decrease), thirds(decrease)[2]
    judged = step > self.warmup and np.sum(decrease) > 0
    self._idle = [*self._idle, step] if judged and share < self.idle_below else []
    if len(self._idle) < self.patience:
      return
    self.warned = step
    warnings.warn(
        f'step {step}: the last third of the layers ({L - L // 3 + 1} to {L} of {L}) brought {share:.1%} of the '
        f'decrease of the loss by all layers, and less than {self.idle_below:.0%} in each of the last {self.patience} '
        f'records, since step {self._idle[0]}: these layers are idle, as the curse of depth (arXiv 2502.05795) has it.',
        stacklevel=3)

  def _in_order(self, states) -> jax.Array:
    """[S, ..., D]."""
    if not isinstance(states, Mapping):
      return jnp.stack(list(states))
    placed = {}
    for path, x in by_layer.leaves(states):
      place = self.layer_of(path)
      of = (-1,) if place is None else by_layer.ids(path, place, x)
      for l, state in zip(of, x if place is not None and not isinstance(place, int) else [x]):
        if l in placed:
          raise UserError(f"{path} is a second state of {'layer ' + str(l) if l >= 0 else 'no layer'}; hand over one.")
        placed[l] = state
    return jnp.stack([placed[l] for l in sorted(placed)])


def _of_states(states: jax.Array, mask) -> dict[str, jax.Array]:
  """'variance' and 'layer_ratio' of states [S, ..., D]."""
  weights = jnp.ones(states.shape[1:-1]) if mask is None else jnp.asarray(mask)
  axes = tuple(range(1, states.ndim - 1))
  total = lambda values: jnp.sum(values * weights, axis=axes)
  square = lambda x: total(jnp.mean(jnp.square(x), axis=-1))
  x = states.astype(wide(states))
  return {'variance': total(hidden_variance(x)) / jnp.maximum(jnp.sum(weights), 1),
          'layer_ratio': jnp.sqrt(square(jnp.diff(x, axis=0)) / square(x[:-1]))}
