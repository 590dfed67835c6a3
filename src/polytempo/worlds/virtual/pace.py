"""How fast each rank of a virtual world is: a straggler's factor for every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from polytempo.cluster import CorrelatedStragglers, Stragglers, constant


class Pace:
    """Draws how many times longer than at full speed a rank computes: once for each step that it marks.

    All computations of a step share the draw (forward, backward of each bucket, codec, update), so a slow step is as
    slow as the distribution says, and their sum does not average it away. A rank that marks no steps, such as a
    parameter server's, draws for each computation, which is a request. Every rank has a stream of its own.
    Distributions that remember (`CorrelatedStragglers`) are asked at the same places.
    """

    def __init__(self, stragglers: Stragglers, hosts: Sequence[int], seed: int) -> None:
        self._stragglers, self._hosts, self._seed = stragglers, hosts, seed
        self._varies = stragglers is not constant()
        self._draws: dict[int, Callable[[float], float]] = {}
        self._steps: list[int | None] = [None] * len(hosts)
        self._factors = [1.0] * len(hosts)

    def begin(self, rank: int, step: int, now_s: float) -> None:
        """Rank `rank` marks `step`. To mark it again changes nothing."""
        if self._varies and self._steps[rank] != step:
            self._steps[rank], self._factors[rank] = step, self._drawn(rank, now_s)

    def begin_all(self, step: int, now_s: float) -> bool:
        """All ranks mark `step`. Whether they are equally fast in it."""
        if not self._varies:
            return True
        for rank in range(len(self._hosts)):
            self.begin(rank, step, now_s)
        return len(set(self._factors)) == 1

    def factor(self, rank: int, now_s: float) -> float:
        """For a computation that begins now."""
        if not self._varies:
            return 1.0
        return self._drawn(rank, now_s) if self._steps[rank] is None else self._factors[rank]

    def _drawn(self, rank: int, now_s: float) -> float:
        draw = self._draws.get(rank)
        if draw is None:
            random = Random(f"{self._seed}/{rank}")
            draw = self._draws[rank] = _drawing(self._stragglers, random, self._hosts[rank])
        return draw(now_s)


def _drawing(stragglers: Stragglers, random: Random, host: int) -> Callable[[float], float]:
    if isinstance(stragglers, CorrelatedStragglers):
        return stragglers.begun(random, host)
    return lambda now_s: stragglers(random, host)
