"""`Lanes`: the places that are left of an epoch, cut into stretches for workers; and again at any step.

    left              0 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 24         2 workers with 2 lanes each, batches of 2
    lanes             0 ━━━ 6, 6 ━━━ 12 │ 12 ━━━ 18, 18 ━━━ 24
    worker 0          0 1   6 7   2 3   8 9   …                a batch of each of its lanes in turn
    worker 1          12 13   18 19   14 15   …
    left, 3 steps on  8 ━ 12, 4 ━ 6, 20 ━ 24, 16 ━ 18          for any number of workers to go on with

Steps have the sizes of `data.plan`: all workers make equally many, and each place is dealt once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from polytempo.data.plan import Pick, Shares, cut, global_batches, micro_batches, part
from polytempo.data.spans import PlaceSpan, num_places


class LanePick(NamedTuple):
    """A batch of a lane: the pick's `start` and `stop` count along all lanes, one behind the other."""

    lane: int
    pick: Pick


class Lanes:
    """The dealing of `left` in global batches to `parts`, each with `interleave` lanes.

    Part p has a batch of its lane t mod `interleave` in step t. Cost: a pick is O(log(spans)); memory is O(parts).
    """

    def __init__(
        self,
        left: Sequence[PlaceSpan],
        global_batch_size: int,
        parts: int,
        interleave: int,
        shares: Shares | None = None,
    ) -> None:
        self._left = [span for span in left if span.size]
        self._parts, self._interleave, self._shares = parts, interleave, shares
        self._ends = list(accumulate(span.size for span in self._left))
        self._num_places = num_places(self._left)
        self.sizes = global_batches(self._num_places, global_batch_size, parts)
        """Samples of each step over all parts."""
        lengths = (self._taken(lane, len(self.sizes)) for lane in range(parts * interleave))
        self._begins = list(accumulate(lengths, initial=0))

    def picks(self, own: Sequence[int], cuts: int = 1) -> Iterator[LanePick]:
        """The batches of the parts `own`, step by step, each in at most `cuts` micro-batches."""
        for step, size in enumerate(self.sizes):
            for number in own:
                lane = number * self._interleave + step % self._interleave
                begin = self._begins[lane] + self._taken(lane, step)
                first, last = part(size, self._parts, number, self._shares)
                whole = Pick(begin, begin + last - first, last - first, size)
                if first == last:  # a stand-in
                    lane, whole = -1 - number, Pick(0, 1, 0, size)
                for pick in cut(whole, micro_batches(cuts, size, self._parts, self._shares)):
                    yield LanePick(lane, pick)

    def spans(self, lane: int) -> list[PlaceSpan]:
        """All places of `lane`; of a negative one, for stand-ins, the first place of all."""
        return self.between(0, 1) if lane < 0 else self.between(self._begins[lane], self._begins[lane + 1])

    def between(self, start: int, stop: int) -> list[PlaceSpan]:
        """The places from `start` to `stop` along all lanes."""
        found: list[PlaceSpan] = []
        number = bisect_right(self._ends, start)
        while start < stop:
            span, end = self._left[number], self._ends[number]
            first = span.stop - (end - start)
            last = span.stop - max(0, end - stop)
            if found and (found[-1].epoch, found[-1].stop) == (span.epoch, first):
                found[-1] = found[-1]._replace(stop=last)
            else:
                found.append(PlaceSpan(span.epoch, first, last))
            start, number = end, number + 1
        return found

    def left(self, steps: int) -> list[PlaceSpan]:
        """The places after so many steps. Dealt to as many parts, they give the batches that would have come next."""
        found: list[PlaceSpan] = []
        for number in range(self._parts):
            for turn in range(steps, steps + self._interleave):
                lane = number * self._interleave + turn % self._interleave
                begin = self._begins[lane] + self._taken(lane, steps)
                for span in self.between(begin, self._begins[lane + 1]):
                    if found and (found[-1].epoch, found[-1].stop) == span[:2]:
                        found[-1] = found[-1]._replace(stop=span.stop)
                    else:
                        found.append(span)
        return found

    def num_left(self, steps: int) -> int:
        """The number of places after so many steps."""
        return self._num_places - steps * self.sizes[0] if steps < len(self.sizes) else 0

    def _taken(self, lane: int, steps: int) -> int:
        """Places of `lane` in the first `steps` steps: all are alike but for the last one."""
        number, place = divmod(lane, self._interleave)
        turns = len(range(place, steps, self._interleave))
        if not turns:
            return 0
        taken = turns * self._samples(self.sizes[0], number)
        last = len(self.sizes) - 1
        if steps > last and last % self._interleave == place:
            taken += self._samples(self.sizes[last], number) - self._samples(self.sizes[0], number)
        return taken

    def _samples(self, size: int, number: int) -> int:
        begin, end = part(size, self._parts, number, self._shares)
        return end - begin
