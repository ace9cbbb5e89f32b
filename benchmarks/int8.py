"""What matrices of 8 bits cost trained runs, and what clipping the scheme's factor does, with and without them.

  python benchmarks/int8.py RUN [RUN ...] [--low=0.5] [--high=1.5]

For every run folder, on the rows that its own evaluation takes: the loss as trained, with int8 matrices
(lns_jax.interop.quantise), and both again with the factor s on each norm's output clipped to [low, high]. The clip is
put into the gains behind which the factor acts, gain * clip(s) / s, so that the model's function is that of a model
whose factors were clipped after training. Ends with one JSON line: {'runs': [{'run', 'scheme', 'seed', 'lr', 'tokens',
'loss', 'matrix_bytes' of the blocks as trained and in int8, and differences of the loss in nats, each with 'value' and
a 95 % interval 'low', 'high' over rows: 'int8', of int8 matrices; 'clip', of the clip; 'int8_of_clipped', of int8
matrices where the factor is clipped; 'clip_of_int8', of the clip where the matrices are int8}], 'groups': the means of
these over the runs of a scheme and rate, with their 95 % interval over seeds}.
"""

from absl import flags

from lns_jax import cli
from lns_jax.errors import UserError

LOW = flags.DEFINE_float('low', 0.5, 'Least factor.', lower_bound=0.0)
HIGH = flags.DEFINE_float('high', 1.5, 'Largest factor.', lower_bound=0.0)

# difference: (variant, that it is taken from)
DIFFERENCES = {'int8': ('int8', 'whole'), 'clip': ('clipped', 'whole'), 'int8_of_clipped': ('clipped_int8', 'clipped'),
               'clip_of_int8': ('clipped_int8', 'int8')}


def clipped(config, params):
  """The model whose factors s are clipped, the ratio put into the gains of its input norms.

  Raises UserError where they are no constants, or there is no such gain.
  """
  import numpy as np

  from lns_jax.layers import schemes
  from lns_jax.models import layout
  layers = dict(layout.unstack(params)['layers'])
  for l in config.layer_ids:
    row = schemes.row(config, l)
    if config.norm == 'nonparametric_layernorm' or not row.in_norm or isinstance(row.s, schemes.Learned):
      raise UserError(f'scheme {config.scheme!r} with model.norm = {config.norm} has no constant factor on a gain, '
                      'which could be clipped.')
    for sub, factors in schemes.factors(config, l).items():
      name, ratio = f'{sub}_in_norm', np.float32(np.clip(factors.s, LOW.value, HIGH.value) / factors.s)
      layers[str(l)] = layers[str(l)] | {name: {k: v * ratio for k, v in layers[str(l)][name].items()}}
  return layout.native(params | {'layers': layers}, config)


def matrix_bytes(params) -> int:
  """Memory of the matrices that int8 is about, with their scales."""
  import jax

  from lns_jax.interop import quantise
  from lns_jax.layers import param
  found = jax.tree_util.tree_leaves_with_path(params['layers'], is_leaf=param.is_quantised)
  return sum(quantise.nbytes(w) for path, w in found if path[-1].key in quantise.INPUTS)


def measure(path: str) -> dict:
  """One entry of 'runs'."""
  from lns_jax import runs
  from lns_jax.interop import quantise
  from lns_jax.interop.load import load, load_run_config
  _, run = load_run_config(path)
  config, params, _ = load(path)
  dataset = runs.open_dataset(path, run)
  models = {'whole': params, 'int8': quantise.int8(params), 'clipped': clipped(config, params)}
  models['clipped_int8'] = quantise.int8(models['clipped'])
  rows, losses = {name: [] for name in models}, {}
  for name, of_model in models.items():
    found = runs.score(run, config, of_model, dataset, max_tokens=run.eval.max_tokens, each=rows[name].append)
    losses[name] = found['loss']
  told = {'run': path, 'scheme': config.scheme, 'seed': run.train.seed, 'lr': run.optimizer.lr, 'loss': losses['whole'],
          'tokens': found['tokens'], 'matrix_bytes': {n: matrix_bytes(models[n]) for n in ('whole', 'int8')}}
  for name, (one, base) in DIFFERENCES.items():
    rise = runs.difference(rows[one], rows[base])
    told[name] = {'value': float(rise.value), 'low': float(rise.low), 'high': float(rise.high)}
  print(f"{path}: {told['loss']:.4f}, " + ', '.join(f"{n} {told[n]['value']:+.5f}" for n in DIFFERENCES), flush=True)
  return told


def groups(found: list[dict]) -> list[dict]:
  """Means over the runs of each scheme and rate."""
  from lns_jax import paired
  kinds = {}
  for r in found:
    kinds.setdefault((r['scheme'], r['lr']), []).append(r)
  means = lambda of: {name: paired.interval([r[name]['value'] for r in of]) for name in DIFFERENCES}
  return [{'scheme': scheme, 'lr': lr, 'seeds': [r['seed'] for r in of], 'loss': sum(r['loss'] for r in of) / len(of),
           **means(of)} for (scheme, lr), of in kinds.items()]


def main(paths):
  found = [measure(path) for path in paths]
  return {'runs': found, 'groups': groups(found)}


def launch():
  """Entry point."""
  cli.run(main, arguments='run folders', interrupted='nothing was written')


if __name__ == '__main__':
  launch()
