"""What all command-line programs share: configs by name, errors in one sentence, one JSON object at the end."""

import dataclasses
import json
import logging as python_logging
import os
import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from lns_jax import config as config_lib
from lns_jax import compile_cache, distributed, files, host, presets, xla_flags
from lns_jax.errors import Preempted, UserError, nearest

flags.disclaim_key_flags()  # they belong to the command that defines them
HELP = ('--help', '-help', '--helpfull', '-h', '--helpshort')


def define_config(default: str | None = None):
  """Defines --config and its --config.x.y overrides. Read it with `presets.resolve(holder.value)`."""
  return config_flags.DEFINE_config_file('config', default and presets.config_path(default),
                                         'Name of a shipped config, or a Python file with get_config().')


def define_xla_flags():
  """Defines --xla_flags, which `run` obeys before the command imports jax."""
  return flags.DEFINE_string(
      'xla_flags', 'none', 'Compiler flags for TPUs to compare with, never timed on a chip: none; untimed, those of '
      f'the chip that is here; or of {", ".join(xla_flags.FLAGS)}. See lns_jax.xla_flags.')


def _before_jax():
  """What the environment must hold before the command imports jax."""
  if not os.environ.get('LNS_JAX_VERBOSE'):
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # what the end of another process means, we say
  host.leave_out_tpu()
  compile_cache.use()
  choice = flags.FLAGS['xla_flags'].value if 'xla_flags' in flags.FLAGS else 'none'
  added = xla_flags.use(choice)
  if choice != 'none':
    print(f'{xla_flags.VARIABLE}: ' + (' '.join(added) or 'nothing is added'), file=sys.stderr)


def _check_override(key: str):
  """Refuses --config.a.b when there is no such setting."""
  known = config_lib.defaults()
  parts = key.split('.')
  for i, part in enumerate(parts):
    if not isinstance(known, dict) or part not in known:
      where = '.'.join(['config', *parts[:i]])
      raise UserError(f'{where} has no setting {part!r}.{nearest(part, known if isinstance(known, dict) else ())}')
    known = known[part]
  if isinstance(known, dict):
    raise UserError(f'config.{key} is a group of settings; name one of them: {", ".join(known)}.')


def _prepare(argv: Sequence[str], positional: bool) -> list[str]:
  """Checks flag names and turns --config=NAME into a path, so that absl meets only what it can parse."""
  known = {name for name in flags.FLAGS} | {'config'}
  prepared, config_first = [argv[0]], []
  arguments = iter(argv[1:])
  for argument in arguments:
    if not argument.startswith('-'):
      if positional:
        prepared.append(argument)
        continue
      raise UserError(f'unexpected argument {argument!r}; settings are given as --name=value.')
    name, equals, value = argument.lstrip('-').partition('=')
    top = name.split('.')[0]
    if top not in known and top.removeprefix('no') not in known:
      raise UserError(f'there is no flag --{top}.{nearest(top, _own_flags())}')
    if not equals and (top == 'config' or not flags.FLAGS[top.removeprefix('no') if top not in known else top].boolean):
      value = next(arguments, None)
      if value is None:
        raise UserError(f'--{name} needs a value: --{name}=VALUE.')
      argument = f'--{name}={value}'
    if name == 'config':
      config_first.append(f'--config={presets.config_path(value)}')
      continue
    if top == 'config':
      _check_override(name.removeprefix('config.'))
    prepared.append(argument)
  if not config_first and any(a.startswith('--config.') for a in prepared) and flags.FLAGS['config'].value is None:
    raise UserError(f'--config must be given: one of {", ".join(presets.config_names())}, or a file.')
  # absl reads flags in order, but overrides need the file first.
  return [prepared[0], *config_first, *prepared[1:]]


def _own_flags() -> list[str]:
  main = flags.FLAGS.get_key_flags_for_module(sys.argv[0]) or flags.FLAGS.get_key_flags_for_module('__main__')
  return [f.name for f in main] + (['config'] if 'config' in flags.FLAGS else [])


def _help(full: bool):
  try:
    print(sys.modules['__main__'].__doc__ or '')
    print(flags.FLAGS.get_help() if full else flags.FLAGS.main_module_help())
    if 'config' in flags.FLAGS:
      print(f'\n  --config: one of {", ".join(presets.config_names())}; or a Python file with get_config().\n')
      print('\n'.join(_settings(config_lib.RunConfig, '--config.')))
    sys.stdout.flush()
  except BrokenPipeError:  # the reader, such as head, has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: Sequence[str], positional: bool) -> list[str]:
  if any(a in HELP for a in argv[1:]):
    _help('--helpfull' in argv)
    sys.exit(0)
  try:
    sys.argv[:] = _prepare(argv, positional)  # ml_collections looks for --config there, too
    return flags.FLAGS(sys.argv)
  except UserError as e:
    _fail(e)
  except flags.IllegalFlagValueError as e:
    missing = re.search(r'Flag --(\w+) must have a value other than None', str(e))
    _fail(f'--{missing[1]} must be given.' if missing else _reason(e))
  except (flags.Error, AttributeError, KeyError, IndexError, TypeError, ValueError) as e:
    _fail(_reason(e))
  except Exception as e:  # whatever a user's config file does
    _fail(f'the config file raised {type(e).__name__}: {e}')


def integers(flag: str, values: Sequence[str]) -> list[int]:
  """The numbers of a flag that is a list. Raises UserError for what is none."""
  for value in values:
    if not re.fullmatch(r'\s*-?[0-9]+\s*', value):
      raise UserError(f'--{flag}={",".join(values)}: {value!r} is not a whole number; they are separated by commas.')
  return [int(value) for value in values]


def _reason(error: Exception) -> str:
  """One line; of an error in a config file, which ml_collections wraps with its traceback, the config's own."""
  lines = str(error).strip().splitlines() or [type(error).__name__]
  own = re.match(r'(?:[\w.]+\.)?(\w+): (.*)', lines[-1]) if 'Traceback (most recent call last):' in lines else None
  if own is None:
    return lines[0]
  return own[2] if own[1] == UserError.__name__ else f'the config file raised {own[1]}: {own[2]}'


def _settings(cls, prefix: str) -> list[str]:
  """One line a setting: name, declared default, meaning."""
  lines = []
  for f in dataclasses.fields(cls):
    if dataclasses.is_dataclass(f.type):
      lines += _settings(f.type, f'{prefix}{f.name}.')
    else:
      lines.append(f'  {prefix}{f.name}={f.default!r}: {f.metadata["doc"]}')
  return lines


def _fail(message) -> None:
  distributed.leave(1, f'error: {message}')
  print(f'error: {message}', file=sys.stderr, flush=True)
  sys.exit(1)


def _quiet():
  """Leaves a user's terminal to our own lines: libraries speak up from warnings on."""
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO if os.environ.get('LNS_JAX_VERBOSE') else logging.WARNING)
  python_logging.getLogger('jax').setLevel(python_logging.ERROR)


def run(main: Callable, *, arguments: str = '',
        interrupted: str = 'what was saved is intact, and the same command goes on from there'):
  """Runs an absl main and prints the dict that it returns as the last line of stdout.

  Args:
    main: takes nothing, or the list of positional arguments when `arguments` says what they are.
    interrupted: what is true after Ctrl-C.

  Exit codes: 0, 1 (an error of the user's, one sentence on stderr), 75 (preempted: run it again), 130 (Ctrl-C).
  """
  def guarded(argv):
    _quiet()
    if 'coordinator' in flags.FLAGS:  # a command of many hosts, which is told by its code whether to try again
      distributed.expect_sigterm()
    try:
      _before_jax()
      if arguments and not argv[1:]:
        raise UserError(f'give one or more {arguments}.')
      result = main(argv[1:]) if arguments else main()
    except UserError as e:
      distributed.leave_if_lost(e)
      _fail(e)
    except Preempted as e:
      print(f'preempted: {e}', file=sys.stderr, flush=True)
      sys.exit(75)
    except KeyboardInterrupt:
      distributed.leave(130, f'interrupted; {interrupted}.')
      print(f'interrupted; {interrupted}.', file=sys.stderr, flush=True)
      sys.stdout.flush()
      os._exit(130)  # an orderly end would wait for the program that the device is running, for minutes of some
    except Exception as e:
      distributed.leave_crashed(e)
      raise
    if result is not None and distributed.primary():
      print(json.dumps(files.finite(result), allow_nan=False), flush=True)
  app.run(guarded, flags_parser=lambda argv: _parse(argv, bool(arguments)))
