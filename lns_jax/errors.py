"""What a run tells its user when it stops early, and how names and numbers are suggested."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """Something the user can mend. The message is one sentence: what is wrong, where, the nearest right thing."""


class Diverged(UserError):
  """Loss or gradient became non-finite; the last good checkpoint is kept."""


class Preempted(Exception):
  """The run was told to stop and has saved; a relaunch continues it. Programs end with code 75 (EX_TEMPFAIL)."""


def nearest(name: str, names: Iterable[str]) -> str:
  """" Did you mean 'lns'? Known: deepnorm, lns, ...", the first half only when a name is near."""
  names = sorted(names)
  close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
  return (f' Did you mean {close[0]!r}?' if close else '') + f' Known: {", ".join(names)}.'


def around(wanted: int, fits: Iterable[int]) -> str:
  """'4 or 8': the nearest of `fits`, of which there is one, on either side of a number."""
  fits = sorted(fits)
  sides = [f for f in fits if f < wanted][-1:] + [f for f in fits if f >= wanted][:1]
  return ' or '.join(map(str, sides))


def divisors(n: int) -> list[int]:
  """Of n, rising."""
  return [d for d in range(1, n + 1) if not n % d]
