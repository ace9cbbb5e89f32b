"""The result of `compile_tpu` as lines for a reader."""

from lns_jax.aot import roofline


def of(result: dict) -> str:
  """The table that the command prints."""
  slices = f"{result['slices']} slices of " if result['slices'] > 1 else ''
  lines = [f"{result['devices']} devices of {slices}{result['topology']}, {result['status']} "
           f"(libtpu {result['libtpu']})", *_memory(result)]
  lines.append(f"saving       {_of_limit(result, 'saving_bytes')}: the state, and its copy if layers are stacked")
  if 'flops' in result:
    lines += _step(result)
  if 'flops' in result.get('eval', {}):
    e = result['eval']
    lines.append(f"evaluation   {_of_limit(e, 'hbm_bytes_per_chip')}, "
                 f"{_three(1e3 * e['roofline']['step_seconds'])} ms a batch at best")
  elif 'eval' in result:
    lines += ['evaluation', *_memory(result['eval'])]
  if not result['fits']:
    lines.append('does not fit; ' + (f"add {' '.join(result['suggestion'])}" if result['suggestion'] else
                                     'no smaller setting was found or sought: take more chips or a larger one.'))
  return '\n'.join(lines)


def _giga(n: float) -> str:
  return f'{n / 1e9:.2f}'


def _three(n: float) -> str:
  """Three digits that mean something, of a small program too."""
  return f'{n:#.3g}' if n < 999.5 else f'{n:,.0f}'


def _of_limit(r: dict, name: str) -> str:
  return (f"{_three(r[name] / 1e9)} of {_three(r['hbm_limit'] / 1e9)} GB a chip: "
          f"{'fits' if r[name] <= r['hbm_limit'] else 'too much'}")


def _memory(r: dict) -> list[str]:
  head = f"memory       {_of_limit(r, 'hbm_bytes_per_chip')}"
  if 'refusal' in r:
    return [head, f"             {r['refusal']}"]
  parts = ('argument', 'temp', 'output', 'code')
  return [head, '             ' + ', '.join(f"{p} {_three(r[f'{p}_bytes'] / 1e9)}" for p in parts)
          + (f", and {_three(r['host_bytes'] / 1e9)} GB of the host" if r['host_bytes'] else '')]


def _step(r: dict) -> list[str]:
  t = r['roofline']
  tera, giga = lambda n: _three(n / 1e12), lambda n: _three(n / 1e9)
  ms = lambda of: _three(1e3 * t[f'{of}_seconds'])
  lines = [f"FLOPs        {tera(r['flops'])} T a chip (kernels by formula {tera(r['kernel_flops'])}); "
           f"the model's own {tera(r['model_flops'] / r['devices'])}",
           f"bytes        {giga(r['bytes'])} GB of main memory a chip; {r['fusions']} fusions",
           *(f"{kind:<24} {c['count']:>6} x, {giga(c['bytes'])} GB a chip"
             for kind, c in sorted(r['collectives'].items())),
           f"time         compute {ms('compute')}, memory {ms('memory')}, links {ms('ici')}, "
           f"other slices {ms('dcn')} ms",
           f"step         {ms('step')} ms at best ({ms('serial')} if nothing hides "
           f"behind anything): MFU {t['mfu']:.1%}, {t['tokens_per_second']:,.0f} tokens/s",
           f'             {roofline.FORMULA}']
  if r['not_counted']:
    lines.append(f"not counted  {', '.join(r['not_counted'])}")
  return [*lines, f"compiled     in {r['compile_seconds']:.0f} s"]


HEAD = """# Compiled for TPUs, never run

Every line is a run of `experiments/compile_for_tpu.py` with the flags beside it: libtpu {versions} compiled the train
step of that preset for that topology on a CPU. Another version gives other numbers (docs/tpu.md). Memory is the
compiler's, of one chip (of v7x half a chip, as JAX counts). FLOPs and bytes are counted in the compiled program, loops
by their turns, kernels by formula; the compiler's own count of bytes holds the body of a loop once, and vector memory
too. Times, MFU and tokens/s are an estimate, not a measurement:

    {formula}

All lines: `python benchmarks/tpu_table.py`, which goes on where it was stopped; a preset that has no line yet was not
compiled yet. The first four are the shapes that docs/performance.md compares with MaxText. A line with "does not fit"
names the flags, found by compiling, with which it does.

"""
COLUMNS = ('preset', 'topology', 'flags', 'memory GB of limit', 'arguments', 'temporaries', 'TFLOP', 'GB moved',
           "GB by the compiler's count", 'GB in collectives', 'ms at best', 'ms if nothing hides', 'MFU at best',
           'tokens/s at best', 'compile s')


def page(found: list[dict]) -> str:
  """The page of many results, each with its 'command'; of one that failed 'error' instead."""
  versions = ' and '.join(sorted({r['libtpu'] for r in found if 'libtpu' in r}))
  head = HEAD.format(formula=roofline.FORMULA.replace('. ', '.\n    '), versions=versions)
  return head + _line(COLUMNS) + '|---' * len(COLUMNS) + '|\n' + ''.join(map(_row, found))


def _line(cells) -> str:
  """A line of the table, filled up with empty cells."""
  return f"| {' | '.join([*cells, *[''] * (len(COLUMNS) - len(cells))])} |\n"


def _row(r: dict) -> str:
  name, topology = (a.partition('=')[2] for a in r['command'][1:3])
  shown = ' '.join(a.removeprefix('--config.') for a in r['command'][3:])
  cells = [name, topology, f'`{shown}`']
  if 'error' in r:
    return _line([*cells, r['error']])
  cells.append(f"{_giga(r['hbm_bytes_per_chip'])} of {_giga(r['hbm_limit'])}")
  if r['saving_bytes'] > r['hbm_limit']:
    cells[-1] += f", {_giga(r['saving_bytes'])} while it is saved"
  if not r['fits']:
    cells[-1] += ': does not fit' + (f"; `{' '.join(r['suggestion'])}` does" if r['suggestion'] else '')
  if 'flops' not in r:
    return _line(cells)
  t = r['roofline']
  cells += [_giga(r['argument_bytes']), _giga(r['temp_bytes']), f"{r['flops'] / 1e12:.2f}", _giga(r['bytes']),
            _giga(r['compiler_bytes']), _giga(sum(c['bytes'] for c in r['collectives'].values())),
            f"{1e3 * t['step_seconds']:.1f}", f"{1e3 * t['serial_seconds']:.1f}", f"{t['mfu']:.1%}",
            f"{t['tokens_per_second']:,.0f}", f"{r['compile_seconds']:.0f}"]
  return _line(cells)
