"""Parts of a global batch that follow the ranks' speeds: pure arithmetic, the same on every rank.

    seconds a sample     1    1    1    2          measured, without waits for others
    parts before        32   32   32   32          a step takes 64
    after one look      35   35   34   24          no part moves by more than a quarter of the equal one
    after two looks     37   37   36   18          a step takes 37; the sum of speeds allows 36.6

pytorch's issue 31553 describes the problem. A part is proportional to its rank's speed, so all ranks end together.
"""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.data.plan import Shares, apportioned

EVERY = 8
"""Steps between two looks at the ranks' speeds."""
LEAST, MOST = 0.5, 2.0
"""Bounds of a part, relative to the equal one."""
MOST_MOVED = 0.25
"""The most that a part changes at one look, relative to the equal one, but for a whole sample."""
ALIKE = 0.05
"""Speeds that differ by less are taken for equal."""
LEAST_GAIN = 0.02
"""Other parts have to make a step shorter by this part of it, unless they are equal again."""
_ROUNDS = 60
_GRAIN = 1 << 20


def next_shares(parts: Shares, seconds: Sequence[float]) -> Shares:
    """The parts of the coming steps, of `parts` samples so far, which took so many `seconds` a sample on each rank.

    >>> next_shares((32, 32, 32, 32), (1.0, 1.0, 1.0, 2.0))
    (35, 35, 34, 24)
    >>> next_shares((32, 32, 32, 32), (1.0, 1.0, 1.01, 1.04))
    (32, 32, 32, 32)
    """
    total, equal = sum(parts), apportioned(sum(parts), (1,) * len(parts))
    if max(seconds) <= (1 + ALIKE) * min(seconds):
        wanted = [total / len(parts)] * len(parts)
    else:
        wanted = wanted_parts(total, seconds)
    furthest = max(abs(there - here) for there, here in zip(wanted, parts, strict=True))
    way = min(1.0, max(1.0, MOST_MOVED * total / len(parts)) / furthest) if furthest else 0.0
    moved = [here + way * (there - here) for there, here in zip(wanted, parts, strict=True)]
    found = apportioned(total, tuple(round(_GRAIN * each) for each in moved))
    shorter = step_seconds(parts, seconds) > (1 + LEAST_GAIN) * step_seconds(found, seconds)
    return found if shorter or found == equal else parts


def wanted_parts(total: int, seconds: Sequence[float]) -> list[float]:
    """Parts of `total` samples in proportion to the speeds 1 / `seconds`, within the bounds; not yet whole numbers.

    The factor is found by bisection: the sum of the bounded parts grows with it.
    """
    each = total / len(seconds)
    low, high = 0.0, MOST * each * max(seconds)
    for _ in range(_ROUNDS):
        factor = (low + high) / 2
        wanted = [min(MOST * each, max(LEAST * each, factor / one)) for one in seconds]
        low, high = (factor, high) if sum(wanted) < total else (low, factor)
    return wanted


def step_seconds(parts: Sequence[float], seconds: Sequence[float]) -> float:
    """Seconds of a step with these parts: of the rank that takes longest."""
    return max(part * each for part, each in zip(parts, seconds, strict=True))
