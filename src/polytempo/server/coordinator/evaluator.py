"""`Evaluator`: gathers the shards' weights of one moment of the run, and has them scored. Without I/O.

    ──Show n──▶ every copy of every shard      ◀──Shown── the head of each, when n batches are decided at it
    all shards show the same number ─▶ score ──Scored──▶ coordinator ──Heard──▶ Show n+1 ──▶ …

Shards release a snapshot only when the coordinator has its score: if the evaluator dies, the next one finds the
snapshot. No worker and no shard waits for a score. Where shards show different numbers, since some snapshots were
released, the highest counts, and the evaluator asks the other shards for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polytempo.core.errors import TimedOut
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.layout import numel_of, place_
from polytempo.server.message import Beat, Heard, Message, Outbox, Scored, Show, Shown, View
from polytempo.server.tensors.running_statistics import RunningOf, of_first
from polytempo.server.timing import Timing

Score = Callable[[int, float, Tensor, Tensor | None], bytes]
"""(batches decided, when that was on the clock of the world, all parameters in one flat vector, the running statistics
of norms) -> a row of metrics, as JSON. The tensors may be written over afterwards."""


class Evaluator:
    """The evaluator on node `node`, of parameters that are `numel` elements of `dtype`, tables included."""

    def __init__(
        self,
        node: int,
        coordinator: int,
        chains: Sequence[Sequence[int]],
        numel: int,
        dtype: torch.dtype,
        score: Score,
        timing: Timing | None = None,
        running_of: RunningOf = of_first,
    ) -> None:
        self.node, self.coordinator = node, coordinator
        self._running_of = running_of
        self.timing = timing or Timing()
        self.finished = False
        self.wanted = 0
        """The snapshot that is asked for, or any after it."""
        self._chains = tuple(tuple(chain) for chain in chains)
        self._score, self._flat = score, torch.empty(numel, dtype=dtype)
        self._parts: dict[int, Shown] = {}
        self._row: Scored | None = None
        """A score that the coordinator has not confirmed."""
        self._epoch = self._layout = 0
        self._asks_at_s = 0.0

    # ------------------------------------------------------------------ the machine

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take a message and return the messages to send. May take as long as a score."""
        match message:
            case View() if message.epoch >= self._epoch:
                return self._see(now_s, message)
            case Shown() if message.number >= self.wanted and message.shard < len(self._chains):
                self._parts[message.shard] = message
                return self._gathered(now_s)
            case Heard() if self._row is not None and message.number >= self._row.number:
                self._row = None
                return self._ask(now_s)
        return []

    def tick(self, now_s: float) -> Outbox:
        """Ask again for missing messages; this also shows that the evaluator lives."""
        if now_s < self._asks_at_s:
            return []
        return [(self.coordinator, Beat(self.node, 1, self._epoch)), *self._ask(now_s)]

    def wait_s(self, now_s: float) -> float:
        """The time until the next `tick`, unless a message arrives."""
        return max(0.0, self._asks_at_s - now_s)

    def flops(self, message: Message) -> float:
        """Scores are off the clock."""
        return 0.0

    # ------------------------------------------------------------------ snapshots

    def _see(self, now_s: float, view: View) -> Outbox:
        self.finished = self.finished or view.finished
        if view.epoch == self._epoch:
            return []
        if view.layout != self._layout:  # the parts so far are of ranges that other shards hold now
            self._layout, self._parts = view.layout, {}
        self._epoch = view.epoch
        holders = view.spans or ((),) * len(view.chains)
        live = [bool(spans) or not view.spans for spans in holders]
        self._chains = tuple(
            chain if number >= len(live) or live[number] else () for number, chain in enumerate(view.chains)
        )
        self._parts = {shard: part for shard, part in self._parts.items() if self._chains[shard]}
        return self._ask(now_s)

    def _ask(self, now_s: float) -> Outbox:
        """The open request: a confirmation of the score, or the next snapshot."""
        self._asks_at_s = now_s + self.timing.retry_s
        if self._row is not None:
            return [(self.coordinator, self._row)]
        lacking = [chain for shard, chain in enumerate(self._chains) if shard not in self._parts]
        return [(node, Show(self.wanted)) for chain in lacking for node in chain]

    def _gathered(self, now_s: float) -> Outbox:
        highest = max(part.number for part in self._parts.values())
        if highest > self.wanted:
            self.wanted = highest
            self._parts = {shard: part for shard, part in self._parts.items() if part.number == highest}
            if out := self._ask(now_s):
                return out
        if any(chain and shard not in self._parts for shard, chain in enumerate(self._chains)):
            return []
        parts = list(self._parts.values())
        if sum(numel_of(part.spans) for part in parts) != self._flat.numel():
            self._parts = {}  # of two layouts: the new view has not come yet, or a snapshot is older than it
            self.wanted += 1
            return []
        for part in parts:
            place_(self._flat, part.spans, part.values)
        running = self._running_of({shard: part.running for shard, part in self._parts.items()})
        seconds = max(part.seconds for part in parts)
        self._row = Scored(highest, self._score(highest, seconds, self._flat, running))
        self.wanted, self._parts = highest + 1, {}
        return self._ask(now_s)


class Scores:
    """The scores of the node `evaluator`; None: the run has no evaluator."""

    def __init__(self, evaluator: int | None, scheduler: BatchScheduler, deadline_s: float) -> None:
        self._evaluator, self._scheduler, self._deadline_s = evaluator, scheduler, deadline_s
        self.highest = -1
        """The highest snapshot with a score."""
        self._since_s: float | None = None

    def take(self, scored: Scored) -> bool:
        """True if this score is new."""
        new = scored.number > self.highest
        self.highest = max(self.highest, scored.number)
        self._since_s = None if new else self._since_s  # an evaluator that is slow makes progress
        return new

    def lacks_last(self, now_s: float) -> bool:
        """True if the score of the last batch has not come. Ask this when all else is over.

        Raises `TimedOut` where that has been so, and no other score has come, for longer than the deadline.
        """
        if self._evaluator is None or self._scheduler.stopped or self.highest >= self._scheduler.num_tickets:
            return False
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s > self._deadline_s:
            remedy = "the evaluator is slow or stands still; give a larger timeout_s, or a smaller test set"
            raise TimedOut(self._evaluator, None, "score of the last batch", self._deadline_s, remedy)
        return True
