"""`Forecast`: how long runs that follow each other still take, from how far they have come."""

from __future__ import annotations

MIN_OBSERVED_S = 1.0
"""A run is watched for so long before anything is said of its end."""


class Forecast:
    """The time left to `num_runs` runs, one after the other. Times are seconds of any one clock.

    A run goes on as fast as it went since its first report, so that starting its processes (or the part that it was
    resumed with) does not count; the runs after it take as long as those before it did on average.
    """

    def __init__(self, num_runs: int = 1) -> None:
        self.number = 0
        """Of the run that goes on, from 1."""
        self._num_runs = num_runs
        self._took_s: list[float] = []
        self._began_s: float | None = None
        self._first: tuple[float, float] | None = None
        self._done = 0.0

    def begin(self, now_s: float) -> None:
        """The next run begins."""
        self.end(now_s)
        self.number += 1
        self._began_s, self._first, self._done = now_s, None, 0.0

    def end(self, now_s: float) -> None:
        """The run that goes on, if there is one, has ended."""
        if self._began_s is not None:
            self._took_s.append(now_s - self._began_s)
        self._began_s = None

    def left_s(self, done: float, now_s: float) -> float | None:
        """The seconds until all runs have ended, where `done` (0 to 1) of this one is done. None: it cannot be told."""
        self._done = done = max(done, self._done)  # reports of several workers do not come in order
        if self._first is None:
            self._first = done, now_s
        first_done, first_s = self._first
        if self._began_s is None or done <= first_done or now_s - first_s < MIN_OBSERVED_S:
            return None
        rest_s = (now_s - first_s) * (1 - done) / (done - first_done)
        all_s = [*self._took_s, now_s - self._began_s + rest_s]
        coming = max(0, self._num_runs - self.number)
        left_s = rest_s + coming * sum(all_s) / len(all_s)
        return left_s if left_s > 0 else None
