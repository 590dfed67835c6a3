"""`GradientArrivals`: which gradients have come in a step, and when they are worth an exchange. It performs nothing.

One exchange for each gradient would cost more than it hides: a thread needs a core for it, which the backward pass has.
So complete groups are gathered until they have enough bytes, the first time fewer, so that the links have something to
do early; without a spare core all wait for the end of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

_FIRST_BYTES, _NEXT_BYTES = 1 << 20, 25 << 20
"""As DistributedDataParallel's buckets."""


class GradientArrivals:
    """`groups`: for each group of parameters the bytes of each. `passes`: how many gradients each gets in a step."""

    def __init__(self, groups: Sequence[Sequence[int]], passes: int) -> None:
        self._sizes, self._bytes = [len(group) for group in groups], [sum(group) for group in groups]
        self._group_of = [number for number, group in enumerate(groups) for _ in group]
        self._passes = passes
        self._ready: list[int] = []
        self._complete: set[int] = set()
        self._taken: set[int] = set()
        self.begin(passes, overlaps=False)

    def begin(self, passes: int, *, overlaps: bool) -> None:
        """A step begins. `overlaps`: whether exchanges may begin before the backward pass is over."""
        self.count_anew(passes)
        self._ready, self._complete, self._taken = [], set(), set()
        self._ready_bytes, self._enough_bytes = 0, float(_FIRST_BYTES) if overlaps else float("inf")

    def count_anew(self, passes: int) -> None:
        """Each parameter gets so many gradients from here on. Groups that are complete stay so."""
        self._passes = passes
        self._counts, self._missing = [0] * len(self._group_of), list(self._sizes)

    def arrived(self, place: int) -> bool | None:
        """A gradient of the parameter at `place`, in the order of the groups. Whether it is time to `take`.

        None: it is one too many.
        """
        group, count = self._group_of[place], self._counts[place] + 1
        if count > self._passes or group in self._complete:
            return None
        self._counts[place] = count
        if count < self._passes:
            return False
        self._missing[group] -= 1
        if self._missing[group]:
            return False
        self._complete.add(group)
        self._ready.append(group)
        self._ready_bytes += self._bytes[group]
        return self._ready_bytes >= self._enough_bytes

    def take(self) -> list[int]:
        """The groups that are complete and have not been taken, in the order of their completion."""
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        self._taken.update(ready)
        self._enough_bytes = max(self._enough_bytes, float(_NEXT_BYTES))
        return ready

    def take_rest(self) -> list[int]:
        """All groups that have not been taken: first those that are complete."""
        return self.take() + self._left()

    def _left(self) -> list[int]:
        left = [number for number in range(len(self._sizes)) if number not in self._taken]
        self._taken.update(left)
        self._complete.update(left)
        return left

    @property
    def under_way(self) -> bool:
        """Whether some group is complete in this step."""
        return bool(self._complete)
