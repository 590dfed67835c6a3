"""`Scores`: which scores the coordinator has. A run waits for the last one only, at its end."""

from __future__ import annotations

from polytempo.core.errors import TimedOut
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.message import Scored


class Scores:
    """The scores of the node `evaluator`; None: the run has no evaluator."""

    def __init__(self, evaluator: int | None, scheduler: BatchScheduler, deadline_s: float) -> None:
        self._evaluator, self._scheduler, self._deadline_s = evaluator, scheduler, deadline_s
        self.highest = -1
        """The highest snapshot whose score has come."""
        self._since_s: float | None = None

    def take(self, scored: Scored) -> bool:
        """Whether this score is new."""
        new = scored.number > self.highest
        self.highest = max(self.highest, scored.number)
        self._since_s = None if new else self._since_s  # an evaluator that is slow makes progress
        return new

    def lacks_last(self, now_s: float) -> bool:
        """Whether the score of the last batch has not come. Ask this when all else is over.

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
