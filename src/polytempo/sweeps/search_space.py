"""The space of a sweep: settings by name, each a range of numbers or a few values, from text.

lr=1e-4..1e-1:log          numbers between, by their logarithms; whole numbers where both ends are
batch_size=16|32|64        one of these
strategy=local_sgd(period=8),sync_sgd      commas separate, too, outside of parentheses and quotes
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import exp, isfinite, log
from random import Random
from typing import NamedTuple

from polytempo.report.saved_trials import Setting
from polytempo.spec.run_options import RunOptions
from polytempo.spec.table.option import entries, unknown_option
from polytempo.spec.text.call import split
from polytempo.spec.text.catalogue import parse_strategy

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(:\s*log)?\s*")
_OWN = ("out", "resume", "seed", "trackers", "callbacks", "reshape")
"""Options of the sweep as a whole."""


class Range(NamedTuple):
    """Numbers from `low` to `high`, both among them; `log`: evenly by their logarithms."""

    low: float
    high: float
    log: bool
    whole: bool

    def draw(self, random: Random) -> Setting:
        """A random one."""
        if self.log:
            found = exp(random.uniform(log(self.low), log(self.high)))
        elif self.whole:
            return random.randint(int(self.low), int(self.high))
        else:
            found = random.uniform(self.low, self.high)
        return min(int(self.high), max(int(self.low), round(found))) if self.whole else found

    def __str__(self) -> str:
        ends = (int(self.low), int(self.high)) if self.whole else (self.low, self.high)
        return f"{ends[0]!r}..{ends[1]!r}{':log' * self.log}"


class Choice(NamedTuple):
    """A few values."""

    values: tuple[Setting, ...]

    def draw(self, random: Random) -> Setting:
        """A random one."""
        return random.choice(self.values)

    def __str__(self) -> str:
        return "|".join(map(str, self.values))


Dimension = Range | Choice
Space = Mapping[str, Dimension]
Over = str | Sequence[str] | Mapping[str, object]


def space_of(over: Over) -> Space:
    """The space: texts "name=values", or a dict of names with texts or lists of values.

    Errors: ValueError for a name that no run has, a value that it cannot have, and an empty space.
    """
    given = _texts([over] if isinstance(over, str) else over) if not isinstance(over, Mapping) else over.items()
    found: dict[str, Dimension] = {}
    for name, values in given:
        if name in found:
            raise ValueError(f"over {name}: it is given twice")
        found[name] = _dimension(name, values)
    if not found:
        raise ValueError("a sweep needs a setting to try, such as over='lr=1e-3..1:log' (--over lr=1e-3..1:log)")
    return found


def _texts(over: Iterable[object]) -> Iterable[tuple[str, object]]:
    for each in over:
        name, equals, values = str(each).partition("=")
        if not equals or not name.strip() or not values.strip():
            raise ValueError(f"over {str(each)!r}: write name=values, such as lr=1e-4..1e-1:log or batch_size=16|32|64")
        yield name.strip().replace("-", "_"), values


def _dimension(name: str, given: object) -> Dimension:
    known = {"strategy", "workers"} | set(entries(RunOptions)) - set(_OWN)
    if name in _OWN:
        raise ValueError(f"over {name}: it is of the sweep as a whole; give it beside")
    if name not in known:
        raise ValueError(f"over {unknown_option(name, sorted(known))}")
    values: Sequence[object]
    if isinstance(given, str):
        if (found := _RANGE.fullmatch(given)) is not None:
            return _checked_range(name, *found.groups())
        values = [_value(name, each) for each in split(given, "|,", "([{", ")]}")]
    else:
        values = list(given) if isinstance(given, Sequence) else [given]
    kept = []
    for value in values:
        _check(name, value)
        kept.append(value if isinstance(value, bool | int | float | str) else str(value))
    if not kept or len(set(map(str, kept))) < len(kept):
        raise ValueError(f"over {name}: give different values, got {given!r}")
    return Choice(tuple(kept))


def _checked_range(name: str, first: str, last: str, logarithmic: str | None) -> Range:
    low, high = float(first), float(last)
    whole = all(re.fullmatch(r"[+-]?\d+", each) for each in (first, last))
    if not (isfinite(low) and isfinite(high) and low < high):
        raise ValueError(f"over {name}={first}..{last}: the first number must be below the second one")
    if logarithmic and low <= 0:
        raise ValueError(f"over {name}={first}..{last}:log: numbers have logarithms above 0 only; begin above 0")
    for value in (low, high):
        _check(name, int(value) if whole else value)
    return Range(low, high, bool(logarithmic), whole)


def _check(name: str, value: object) -> None:
    try:
        if name == "strategy":
            parse_strategy(str(value))
        elif name != "workers":
            entries(RunOptions)[name].checked(value)
        elif not (isinstance(value, int) and value >= 1):
            raise ValueError("must be a whole number above 0")
    except ValueError as error:
        raise ValueError(f"over {name}={value}: {error}") from None


def _value(name: str, text: str) -> Setting:
    """A number where the text is one and the setting is not itself a text."""
    if text in ("true", "false") and name != "strategy":
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
