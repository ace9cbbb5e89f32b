"""Combinations of settings that are allowed but known to disappoint, or that do less than they seem to."""

import dataclasses

from lns_jax.config import RunConfig
from lns_jax.layers import init as init_lib
from lns_jax.layers import schemes


def warnings(config: RunConfig, platform: str = '') -> list[str]:
  """One sentence each. platform: 'cpu', 'tpu' or 'gpu', where it is known."""
  m, o = config.model, config.optimizer
  row = schemes.row(m, m.layer_ids[-1])
  sites = [schemes.site(m, m.depth, sub) for sub in schemes.SUBLAYERS]
  in_front = [schemes.constant(row.s, at) * row.in_gain(at) for at in sites]  # on the last layer's norms
  behind = [schemes.constant(row.b, at) for at in sites] if row.b is schemes.power else []
  found = [f'model.{f.name} = {getattr(m, f.name)} is read by model.scheme = {f.metadata["scheme"]} alone; '
           f'with {m.scheme} it changes nothing.' for f in dataclasses.fields(m)
           if f.metadata['scheme'] not in (None, m.scheme) and getattr(m, f.name) != f.default]
  if any(k != 1.0 for k in (*in_front, *behind)) and init_lib.INITS[m.init].depth_scaled:
    found.append(f'model.scheme = {m.scheme} with model.init = {m.init}: both shrink deep branches, and together the '
                 'paper measured 25.80 against 25.76 for lns alone at 130M (Table 6); model.init = normal is plain.')
  if m.qk_norm != 'none' and m.norm != 'dyt' and in_front[0] != 1.0:
    found.append(f'model.scheme = {m.scheme} with model.qk_norm = {m.qk_norm}: the norm of queries and keys undoes '
                 "the scheme's factor there, so that it acts on the values and the MLP only.")
  if (m.p_attn, m.p_mlp) != (0.5, 0.5) and not _reads_exponent(row, sites[0]._replace(l=2)):
    found.append(f'model.p_attn = {m.p_attn} and model.p_mlp = {m.p_mlp} are exponents of factors l^-p, and '
                 f'model.scheme = {m.scheme} has none: they change nothing.')
  if m.scheme == 'mix' and not schemes.mix_layers(m.depth, m):
    found.append(f'model.scheme = mix with model.mix_fraction = {m.mix_fraction} and model.mix_count = {m.mix_count} '
                 f'of {m.depth} layers is no Post-LN layer at all: this is pre.')
  if row.s is schemes.stabilised:
    found.append("model.scheme = lns_stabilised gives layers 1 and 2 the same factor, and every later one about that "
                 "of the layer before it: the second seed's formula; lns is the paper's.")
  if m.scheme == 'mix' and m.mix_count >= 0 and m.mix_fraction != type(m).mix_fraction:
    found.append(f'model.mix_count = {m.mix_count} takes the place of model.mix_fraction = {m.mix_fraction}, which is '
                 'not read.')
  if m.scheme == 'mix' and schemes.mix_layers(m.depth, m) == m.depth:
    found.append(f'model.scheme = mix with all {m.depth} layers Post-LN is post.')
  if schemes.grows(m) and config.train.steps and config.train.steps < m.prores_steps * m.depth:
    share = min(config.train.steps / (m.prores_steps * m.depth), 1.0)
    found.append(f'model.prores_steps = {m.prores_steps}: after {config.train.steps} updates the branches of layer '
                 f'{m.depth} have come to {share:.1%} of their size; {max(config.train.steps // m.depth, 1)} or less '
                 'would make the last layer whole.')
  if row.init and m.init not in ('normal', 'head', row.init):
    found.append(f'model.scheme = {m.scheme} starts the matrices of blocks by its own init {row.init}; model.init = '
                 f'{m.init} reaches the embedding and the head only.')
  if (o.alpha_clip, o.alpha_lr_ratio) != ('joint', 1.0) and not schemes.learns(m):
    found.append(f'optimizer.alpha_clip = {o.alpha_clip} and optimizer.alpha_lr_ratio = {o.alpha_lr_ratio} reach '
                 f'learned factors, and model.scheme = {m.scheme} has none.')
  return found + _of_devices(config, platform)


def _of_devices(config: RunConfig, platform: str) -> list[str]:
  m, found = config.model, []
  if m.matmul == 'fp8' and platform == 'cpu':
    found.append('model.matmul = fp8 on a CPU is emulated, slower than model.matmul = plain: its numbers can be looked '
                 'at here, its speed cannot.')
  if m.microbatches and config.mesh.stage == 1:
    found.append(f'model.microbatches = {m.microbatches} is read by a pipeline alone, and with mesh.stage = 1 there is '
                 'none; train.accumulation cuts a batch without one.')
  return found


def _reads_exponent(row: schemes.Row, at: schemes.Site) -> bool:
  """Whether any factor of the row, or a learned one's start, depends on p."""
  def values(p):
    there = at._replace(p=p)
    entries = [getattr(row, name) for name in schemes.FACTORS]
    starts = [e.start(there) for e in entries if isinstance(e, schemes.Learned)]
    return [*(schemes.constant(e, there) for e in entries), *starts, row.in_gain(there)]
  return values(0.5) != values(1.0)
