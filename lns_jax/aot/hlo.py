"""Reads the text of a compiled program: its computations, what calls what, and how often each loop turns."""

import dataclasses
import math
import re
from collections.abc import Iterator

BITS = {'pred': 8, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16, 's32': 32, 'u32': 32, 's64': 64, 'u64': 64,
        'bf16': 16, 'f16': 16, 'f32': 32, 'f64': 64, 'c64': 64, 'c128': 128}


@dataclasses.dataclass(frozen=True)
class Array:
  """Type, dimensions and memory space of a value: 0 is the chip's main memory, 1 of a TPU its vector memory."""

  dtype: str
  dims: tuple[int, ...]
  space: int

  @property
  def size(self) -> int:
    return math.prod(self.dims)

  @property
  def nbytes(self) -> int:
    """Without the padding of tiles."""
    bits = 8 if self.dtype.startswith('f8') else BITS.get(self.dtype, 0)  # a token has none
    return self.size * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line: `name` = `opcode`(`operands`), with the arrays that it makes, a tuple's in a row."""

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  argument: str  # what stands between the parentheses
  attributes: str  # what stands behind them
  is_root: bool

  def attribute(self, name: str) -> str:
    """An attribute that is a name, a number or a list, without quotes, braces and %; '' where there is none."""
    found = re.search(rf'\b{name}=(?:\{{([^}}]*)\}}|[%"]?([\w.\-]+))', self.attributes)
    return (found[1] if found[1] is not None else found[2]) if found else ''

  def numbers(self, name: str) -> list[int]:
    return [int(n) for n in re.findall(r'\d+', self.attribute(name))]


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
  """Computations by name, and the name of that which runs first."""

  computations: dict[str, Computation]
  entry: str

  def called(self, instruction: Instruction) -> list[str]:
    """The computations that a fusion, a call, a conditional or an asynchronous start runs."""
    names = [instruction.attribute(a) for a in ('calls', 'to_apply', 'true_computation', 'false_computation')]
    names += re.findall(r'%([\w.\-]+)', instruction.attribute('branch_computations'))
    return [n for n in names if n in self.computations]

  def executed(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, Computation, int]]:
    """(instruction, the computation it is in, times that it runs), outside of fusions.

    A loop's body runs its trip count times, one whose count is not known once. Of a conditional every branch is given,
    as if each ran: an upper bound.
    """
    computation = self.computations[name or self.entry]
    for instruction in computation.values():
      yield instruction, computation, times
      if instruction.opcode == 'while':
        trips = self.trips(instruction, computation)
        yield from self.executed(instruction.attribute('body'), times * (1 if trips is None else trips))
      elif instruction.opcode in ('call', 'conditional', 'async-start'):
        for callee in self.called(instruction):
          yield from self.executed(callee, times)

  def trips(self, loop: Instruction, computation: Computation) -> int | None:
    """How often a `while` turns: as the compiler notes it, else from its counter's start, step and bound.

    None where the condition is no comparison of a counter with a constant.
    """
    noted = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if noted:
      return int(noted[1])
    start = _tuple(computation, loop.operands[0])
    condition, body = (self.computations[loop.attribute(a)] for a in ('condition', 'body'))
    test = self._comparison(condition)
    if test is None or start is None:
      return None
    def value(name, inside=condition):
      """A constant, of the condition's own or one that the loop carries from its start."""
      field = _field(inside, name)
      return _constant(inside, name) if field is None else _constant(computation, start[field])
    (counter, bound), direction = test
    field, after = _field(condition, counter), _tuple(body, _root(body).name)
    if field is None or after is None:
      return None
    step = body[_through(body, after[field])]
    by = [_constant(body, n) for n in step.operands if _field(body, n) != field] if step.opcode == 'add' else [None]
    first, last = value(counter), value(bound)
    if None in (first, last, by[0]) or by[0] <= 0 or direction not in ('LT', 'LE'):
      return None
    return max(0, -(-(last + (direction == 'LE') - first) // by[0]))

  def _comparison(self, condition: Computation):
    """((left, right), direction) of the comparison that ends a condition, the names being the condition's own."""
    root = _root(condition)
    if root.opcode == 'compare':
      return root.operands, root.attribute('direction')
    if root.opcode != 'fusion':
      return None
    inner = self.computations[root.attribute('calls')]
    test = _root(inner)
    if test.opcode != 'compare' or any(inner[n].opcode != 'parameter' for n in test.operands):
      return None
    return [root.operands[int(inner[n].argument)] for n in test.operands], test.attribute('direction')


def _root(computation: Computation) -> Instruction:
  return next(i for i in computation.values() if i.is_root)


def _through(computation: Computation, name: str) -> str:
  """What a value is a copy of."""
  while computation[name].opcode in ('copy', 'bitcast', 'convert', 'copy-done', 'copy-start'):
    name = computation[name].operands[0]
  return name


def _tuple(computation: Computation, name: str) -> tuple[str, ...] | None:
  made = computation[_through(computation, name)]
  return made.operands if made.opcode == 'tuple' else None


def _constant(computation: Computation, name: str) -> int | None:
  found = computation[_through(computation, name)]
  return int(found.argument) if found.opcode == 'constant' and re.fullmatch(r'-?\d+', found.argument) else None


def _field(computation: Computation, name: str) -> int | None:
  """Which field of the computation's parameter a value is."""
  found = computation[_through(computation, name)]
  if found.opcode != 'get-tuple-element' or computation[found.operands[0]].opcode != 'parameter':
    return None
  return int(found.attribute('index'))


def parse(text: str) -> Program:
  """The program of `compiled.as_text()`.

  Newer compilers write `%x#2` where they wrote a line `%y = ... get-tuple-element(%x), index=2`, and `%y` for it: it is
  an instruction here as well, called 'x#2'.
  """
  computations, entry, current = {}, '', None
  for line in text.splitlines():
    header = re.match(r'(ENTRY )?%?([\w.\-]+) \(.*\{$', line)
    if header:
      current = computations[header[2]] = {}
      kinds = {}
      entry = header[2] if header[1] else entry
    elif current is not None and line.startswith('  '):
      found = _instruction(line)
      if found:
        instruction, kinds[instruction.name] = found
        for name in instruction.operands:
          _add_elements(name, current, kinds)
        current[instruction.name] = instruction
  return Program(computations, entry)


def _instruction(line: str) -> tuple[Instruction, str] | None:
  """An instruction, and its type as it is written."""
  head = re.match(r'\s+(ROOT )?%?([\w.\-]+) = ', line)
  if not head:
    return None
  rest = line[head.end():]
  end = _closing(rest) if rest.startswith('(') else rest.index(' ')
  kind, call = rest[:end], rest[end:].lstrip()
  opcode, _, behind = call.partition('(')
  close = _closing('(' + behind) - 2
  argument = behind[:close]
  return Instruction(head[2], opcode, arrays(kind), tuple(re.findall(r'%([\w.\-#]+)', argument)), argument,
                     behind[close + 1:], bool(head[1])), kind


def _add_elements(name: str, computation: Computation, kinds: dict[str, str]):
  """The element 'x#2' of a tuple as an instruction; of 'x#2#0' those of all levels."""
  of, found, index = name.rpartition('#')
  if not found or name in computation:
    return
  _add_elements(of, computation, kinds)
  kinds[name] = _elements(kinds[of])[int(index)]
  computation[name] = Instruction(name, 'get-tuple-element', arrays(kinds[name]), (of,), f'%{of}', f', index={index}',
                                  False)


def _elements(kind: str) -> list[str]:
  """The types in a tuple's, which may be tuples."""
  depth, parts = 0, ['']
  for character in kind[1:-1]:
    depth += (character in '([{') - (character in ')]}')
    if character == ',' and depth == 0:
      parts.append('')
    else:
      parts[-1] += character
  return [re.sub(r'/\*.*?\*/', '', part).strip() for part in parts]


def _closing(text: str) -> int:
  """Just behind the parenthesis that closes the one that `text` starts with."""
  depth = 0
  for found in re.finditer(r'[()]', text):
    depth += 1 if found[0] == '(' else -1
    if not depth:
      return found.end()
  raise ValueError(f'no closing parenthesis in {text[:80]!r}')


def arrays(kind: str) -> tuple[Array, ...]:
  """The arrays of a type as it is written, 'f32[2,3]{1,0:S(1)}' or a tuple of such."""
  found = re.findall(r'\b(\w+)\[([\d,]*)\](\{[^}]*\})?', kind)
  def space(layout):
    named = re.search(r'S\((\d+)\)', layout)
    return int(named[1]) if named else 0
  return tuple(Array(dtype, tuple(int(n) for n in dims.split(',') if n), space(layout))
               for dtype, dims, layout in found)
