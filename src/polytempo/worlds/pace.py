"""How fast each rank of a virtual world is: a straggler's factor for every step."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from polytempo.cluster import Stragglers


class Pace:
    """Draws how many times longer than at full speed a rank computes: once for each step that it marks.

    All computations of a step share the draw (forward, backward of each bucket, codec, update), so a slow step is as
    slow as the distribution says, and their sum does not average it away. A rank that marks no steps, such as a
    parameter server's, draws for each computation, which is a request. Every rank has a stream of its own.
    """

    def __init__(self, stragglers: Stragglers, hosts: Sequence[int], seed: int) -> None:
        self._stragglers, self._hosts = stragglers, hosts
        self._random = [Random(f"{seed}/{rank}") for rank in range(len(hosts))]
        self._steps: list[int | None] = [None] * len(hosts)
        self._factors = [1.0] * len(hosts)

    def begin(self, rank: int, step: int) -> None:
        """Rank `rank` marks `step`. To mark it again changes nothing."""
        if self._steps[rank] != step:
            self._steps[rank], self._factors[rank] = step, self._drawn(rank)

    def factor(self, rank: int) -> float:
        """For a computation that begins now."""
        return self._drawn(rank) if self._steps[rank] is None else self._factors[rank]

    def _drawn(self, rank: int) -> float:
        return self._stragglers(self._random[rank], self._hosts[rank])
