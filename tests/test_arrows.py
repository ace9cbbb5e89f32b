"""The rooms of the design: nothing imports upward."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / 'lns_jax'
# A module may import from its own room and from those named here.
ALLOWED = {
    'errors': set(), 'files': {'errors'}, 'paired': set(),
    'joining': {'errors'}, 'distributed': {'errors', 'joining', 'signals'}, 'remote': {'distributed', 'errors', 'files'},
    'layers.schemes': set(), 'layers.init': set(), 'layers.completep': set(),
    'settings': {'errors'}, 'host': {'errors'},
    'model_config': {'errors', 'settings', 'layers.schemes', 'layers.init'},
    'config': {'errors', 'settings', 'model_config'},
    'advice': {'config', 'layers.schemes', 'layers.init'},
    'presets': {'config', 'errors'},
    'mesh': {'errors'},
    'layers': {'config', 'errors', 'mesh'},
    'models': {'config', 'errors', 'settings', 'layers', 'mesh'},
    'sharding': {'config', 'errors', 'layers', 'mesh', 'models'},
    'shards': {'mesh', 'models'},
    'data': {'config', 'errors', 'files'},
    'depth': {'config', 'errors', 'files', 'layers', 'models'},
    'train': {'advice', 'config', 'distributed', 'errors', 'files', 'host', 'layers', 'models', 'data', 'remote',
              'sharding', 'shards', 'signals'},
    'aot': {'config', 'distributed', 'errors', 'host', 'models', 'sharding', 'shards', 'train'},
    'interop': {'config', 'distributed', 'errors', 'files', 'layers', 'models', 'data', 'remote', 'sharding',
                'train.checkpoint', 'train.run_info', 'train.stored'},
    'reproduce': {'config', 'errors', 'files', 'paired', 'presets', 'cli', 'layers', 'depth', 'train'},
    'signals': set(),
    'compile_cache': {'files'}, 'xla_flags': {'errors'},
    'cli': {'compile_cache', 'config', 'distributed', 'errors', 'files', 'host', 'presets', 'xla_flags'},
}


def room(module: str) -> str:
  return next(r for r in sorted(ALLOWED, key=len, reverse=True) if module == r or module.startswith(r + '.'))


def imports(path: pathlib.Path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'lns_jax':
      base = node.module.removeprefix('lns_jax').lstrip('.')
      for alias in node.names:
        deeper = f'{base}.{alias.name}'.lstrip('.')
        is_module = (PACKAGE / deeper.replace('.', '/')).with_suffix('.py').exists() or (
            PACKAGE / deeper.replace('.', '/')).is_dir()
        yield deeper if is_module else base
    elif isinstance(node, ast.Import):
      yield from (a.name.removeprefix('lns_jax.') for a in node.names if a.name.startswith('lns_jax.'))


MODULES = [p for p in sorted(PACKAGE.rglob('*.py')) if p.name != '__init__.py' and p.stem not in (
    'twins', 'runs', 'samples', 'diagnose', 'surgery', 'vl_layers')]


@pytest.mark.parametrize('path', MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_one_way(path):
  module = '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
  mine = room(module)
  for target in imports(path):
    own = target.split('.')[0] == mine.split('.')[0]
    assert own or any(target == a or target.startswith(a + '.') for a in ALLOWED[mine]), f'{module} imports {target}'
