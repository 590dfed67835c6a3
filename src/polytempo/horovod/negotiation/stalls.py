"""Names that only some ranks have submitted: a warning, and after a longer time the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class StallLimits:
    """After how many seconds such a name is warned of, and ends the negotiation. 0: never."""

    warn_s: float = 60.0
    end_s: float = 300.0


@dataclass
class PartlySubmitted:
    """Since when some ranks wait for the others."""

    since_s: float
    warned: bool = False

    def is_over(self, now_s: float, limits: StallLimits) -> bool:
        """Whether the others had time enough."""
        return 0 < limits.end_s <= now_s - self.since_s

    def to_warn(self, now_s: float, limits: StallLimits) -> bool:
        """Whether it is time for the warning, which comes once."""
        due = not self.warned and 0 < limits.warn_s <= now_s - self.since_s
        self.warned |= due
        return due


def description(name: str, there: Sequence[int], missing: Sequence[int], seconds: float, elsewhere: str) -> str:
    """Who has submitted `name` and who has not. `elsewhere`: other process sets in which the same name waits."""
    return (
        f"tensor {name!r} was submitted by ranks {list(there)} and not by ranks {list(missing)} for {seconds:.0f} s; "
        f"all ranks of a process set must submit the same names{elsewhere}"
    )
