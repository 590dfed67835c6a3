"""`RunningStatistics`: the running statistics of a model's norm layers at a shard. Every shard has all of them.

push    ── statistics of the worker, as its batches have left them ──▶ b₁, b₂, … of the c gradients of an update
update  b ← (1 - p) b + p (b₁ + … + b_c) / c        p = min(1, c / λ), λ the workers
pull    ◀── b ──

A step of all workers thus has the mean of theirs, as synchronous training has; and with an update for each push, λ
pushes move them about as far as one step of all does. Statistics are mixed, not their differences, so a variance stays
above 0 at any staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from polytempo.server.message import Push, PushPart

RunningOf = Callable[[Mapping[int, Tensor | None]], Tensor | None]
"""Each shard's running statistics -> the whole model's."""


def of_first(parts: Mapping[int, Tensor | None]) -> Tensor | None:
    """The first shard's: shards differ, and workers pull the first one's, too."""
    return parts[min(parts)]


class RunningStatistics:
    """`present`: shape (numel,), float64; None: the model has none. No tensor is written to once it is here."""

    def __init__(self, present: Tensor | None, total: Tensor | None = None, count: int = 0) -> None:
        self.present = present
        self.total, self.count = total, count
        """The sum of the statistics that came with the gradients in the sum, and how many these are."""

    def fault(self, push: Push | PushPart, *, allow_nan: bool = False) -> str:
        """The reason to refuse the statistics of a push; "" if there is none."""
        if push.running is None and self.present is None:
            return ""
        given, who = push.running, f"worker {push.worker}, clock {push.clock}"
        theirs, mine = (None if one is None else (one.dtype, tuple(one.shape)) for one in (given, self.present))
        if theirs != mine:
            return f"{who}: the running statistics of norms are {theirs}, and the shard holds {mine}"
        if given is None or allow_nan or bool(given.isfinite().all()):
            return ""
        bad = int((~given.isfinite()).nonzero()[0])
        return f"{who}: element {bad} of the running statistics of norms is {float(given[bad])}"

    def add(self, given: Tensor | None) -> None:
        """The gradient with the statistics `given` was added to the sum."""
        if given is not None:
            self.total = given if self.total is None else self.total + given
            self.count += 1

    def update(self, workers: int) -> None:
        """The sum of gradients was used for an update."""
        if self.present is None or self.total is None:
            return
        mean, part = self.total / self.count, min(1.0, self.count / max(1, workers))
        self.present = mean if part == 1 else self.present + part * (mean - self.present)
        self.total, self.count = None, 0

    def mix(self, given: Tensor | None, alpha: float) -> None:
        """b ← (1 - α) b + α given: elastic averaging."""
        if self.present is not None and given is not None:
            self.present = self.present + alpha * (given - self.present)
