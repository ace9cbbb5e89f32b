"""depth.json: what the depth measures found, as plain JSON values."""

from lns_jax import files
from lns_jax.config import ModelConfig
from lns_jax.depth.estimate import Estimate


def make(model: str, config: ModelConfig, estimates: dict[str, Estimate]) -> dict:
  """{'model', 'layers', 'layer_ids', 'tokens', measure: values, 'intervals': {measure: {'low', 'high'}}}.

  'variance' [L + 1], 'angular' L x L with angular[n - 1][l - 1] and null where l + n > L + 1, 'layer_drop' [L]
  in nats per token, 'block_influence' [L], 'baseline' []; intervals are 95 % over sequences.
  """
  intervals = {name: {'low': files.finite(e.low), 'high': files.finite(e.high)} for name, e in estimates.items()}
  return {'model': model, 'layers': config.num_layers, 'layer_ids': list(config.layer_ids),
          'tokens': int(max(e.tokens for e in estimates.values())),
          **{name: files.finite(e.value) for name, e in estimates.items()}, 'intervals': intervals}
