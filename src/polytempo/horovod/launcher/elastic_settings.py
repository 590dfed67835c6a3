"""`ElasticSettings`: the bounds of an elastic run, by `horovodrun`'s names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MOST = 4096


class ElasticSettings(NamedTuple):
    """Make it by `of`, which checks it."""

    num_proc: int
    minimum: int
    maximum: int
    timeout_s: float = 600.0
    """How long `minimum` processes are waited for."""
    reset_limit: int | None = None
    """After so many changes of the group the run ends; None: after any number."""
    cooldown_s: tuple[float, float] | None = None
    """See `HostSlots`."""

    @classmethod
    def of(
        cls,
        num_proc: int | None,
        minimum: int | None,
        maximum: int | None,
        *,
        timeout_s: float = 600.0,
        reset_limit: int | None = None,
        cooldown_s: Sequence[float] | None = None,
    ) -> ElasticSettings:
        """What is not given follows from the others. ValueError for what no run can keep."""
        first = num_proc or minimum or 1
        least, most = minimum or first, maximum or _MOST
        if not 1 <= least <= first <= most <= _MOST:
            raise ValueError(
                f"an elastic run has 1 <= min-np <= np <= max-np <= {_MOST}, got {least}, {first} and {most}"
            )
        if not timeout_s > 0 or (reset_limit is not None and reset_limit < 1):
            raise ValueError(
                f"elastic-timeout {timeout_s:g} must be more than 0 seconds, and reset-limit {reset_limit} at least 1"
            )
        if cooldown_s is not None and not (len(cooldown_s) == 2 and 0 < cooldown_s[0] <= cooldown_s[1]):
            raise ValueError(
                f"blacklist-cooldown-range {list(cooldown_s)} must be two numbers of seconds: the shortest, the longest"
            )
        cooldown = None if cooldown_s is None else (float(cooldown_s[0]), float(cooldown_s[1]))
        return cls(first, least, most, timeout_s, reset_limit, cooldown)
