"""`NextPush`: tickets, batches, samples and learning rates of a worker's next push; and exchanges under way."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from polytempo.server.step_rates import common


class PushFacts(NamedTuple):
    """The facts of a pushed gradient. `batches`: they are done once all shards have acknowledged the push."""

    tickets: tuple[int, ...]
    batches: tuple[int, ...]
    samples: int
    lrs: tuple[float, ...]
    versions: tuple[int, ...] | None = None
    """Each shard's version of the parameters behind the last gradient; None: the present one."""
    unused: tuple[str, ...] = ()
    """The parameters without a gradient in all of the push."""


class NextPush:
    """Facts of the gradients since the last push. `tickets`: their tickets."""

    def __init__(self) -> None:
        self.tickets: list[int] = []
        self._batches: list[int] = []
        self._samples = 0
        self._lrs: list[tuple[float, ...]] = [()]
        """The rates of each of the gradients; without a gradient, the rates of the last push."""
        self._versions: tuple[int, ...] | None = None
        self._unused: tuple[str, ...] | None = None

    def add(
        self,
        tickets: Sequence[int],
        lrs: Sequence[float],
        samples: int,
        batches: Sequence[int],
        versions: tuple[int, ...] | None = None,
    ) -> None:
        """One more gradient."""
        if not self.tickets:
            self._lrs = []
        self._lrs.append(tuple(lrs))
        self.tickets += tickets
        self._batches += batches
        self._samples += samples
        self._versions = versions

    def note_unused(self, names: Collection[str]) -> None:
        """One more gradient has nothing for the parameters `names`."""
        self._unused = common(self._unused, names)

    def take(self, samples: int) -> PushFacts:
        """The facts of a push of all gradients so far. `samples`: their number, 0 for the sum from `add`."""
        lrs = mean_rates(self._lrs)
        tickets, batches, samples = tuple(self.tickets), tuple(self._batches), samples or self._samples
        facts = PushFacts(tickets, batches, samples, lrs, self._versions, self._unused or ())
        self.tickets, self._batches, self._samples, self._lrs = [], [], 0, [lrs]
        self._versions = self._unused = None
        return facts


def mean_rates(several: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The mean of each column; to the bit where all rows are alike."""
    first = several[0]
    if all(one == first for one in several):
        return first
    return tuple(math.fsum(column) / len(several) for column in zip(*several, strict=True))


class PendingExchange:
    """A push or pull under way. `value` is its answer once it is `done`."""

    def __init__(self, what: str, waits_for: set[int]) -> None:
        self.what, self.waits_for = what, waits_for
        self.value: Tensor | None = None

    @property
    def done(self) -> bool:
        """True if every shard has answered."""
        return not self.waits_for

    def __str__(self) -> str:
        return f"{self.what} (shards {sorted(self.waits_for)} have not answered)"
