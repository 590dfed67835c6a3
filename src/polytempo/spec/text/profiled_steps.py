"""`ProfiledSteps`: the steps of a run that `torch.profiler` records, and the ranks: "20:30", "20:30@0,3"."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_RANKS = 8
MOST_STEPS = 1000
_TEXT = re.compile(r"(\d{1,12}):(\d{1,12})(?:@(\d{1,6}(?:,\d{1,6})*|all))?")


@dataclass(frozen=True)
class ProfiledSteps:
    """Steps `first` to `last` - 1, counted from 0, on some ranks."""

    first: int
    last: int
    ranks: tuple[int, ...] | None = None
    """None: the first eight. (): all."""

    def has(self, rank: int) -> bool:
        """True if `rank` records."""
        return rank < MOST_RANKS if self.ranks is None else not self.ranks or rank in self.ranks

    def check(self, num_ranks: int, num_steps: int | None = None) -> None:
        """ValueError for a run of so many ranks and steps that lacks one of the ranks, or has none of the steps."""
        if missing := [rank for rank in self.ranks or () if rank >= num_ranks]:
            raise ValueError(
                f"profile={self}: there is no rank {missing[0]}, as there are {num_ranks}, counted from 0; give others"
            )
        if num_steps is not None and num_steps <= self.first:
            raise ValueError(
                f"profile={self} begins after the run's end: its {num_steps} steps are counted from 0; give earlier "
                f"ones, such as {max(0, num_steps - 10)}:{num_steps}"
            )

    def missed(self, begin: int, end: int) -> str | None:
        """A sentence about a run that has made the steps `begin` to `end` - 1, where these lack some to be recorded."""
        first, last = max(self.first, begin), min(self.last, end)
        if (first, last) == (self.first, self.last):
            return None
        found = f"recorded {last - first} of {self.last - self.first} steps" if first < last else "recorded nothing"
        made = f"the steps {begin} to {end - 1}" if begin < end else "no step"
        return f"profile={self} {found}, because the run has made {made}"

    def __str__(self) -> str:
        where = "" if self.ranks is None else f"@{','.join(map(str, self.ranks)) or 'all'}"
        return f"{self.first}:{self.last}{where}"


def profiled_steps(given: object) -> ProfiledSteps | None:
    """The value of an option `profile`, also from text. ValueError for steps that cannot be recorded."""
    if given is None or isinstance(given, ProfiledSteps):
        return given
    found = _TEXT.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise ValueError(
            "write the first step and the step after the last, such as 20:30, and perhaps ranks, as in 20:30@0,3 or "
            "20:30@all"
        )
    first, last, ranks = int(found[1]), int(found[2]), found[3]
    if not 0 < last - first <= MOST_STEPS:
        raise ValueError(
            f"it has {max(0, last - first)} steps, and a profile has 1 to {MOST_STEPS}; write 20:30 for the ten steps "
            "from 20 on"
        )
    chosen = None if ranks is None else () if ranks == "all" else tuple(sorted(set(map(int, ranks.split(",")))))
    return ProfiledSteps(first, last, chosen)
