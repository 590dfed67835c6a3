"""Failures to inject into a virtual world."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Crash:
    """Rank `rank` dies: when it marks step `step`, or at time `at_s`. Give exactly one of the two."""

    rank: int
    step: int | None = None
    at_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless exactly one of step and time is given."""
        if (self.step is None) == (self.at_s is None):
            raise ValueError(f"a crash happens at a step or at a time: give one of them, got {self}")
        if self.at_s is not None and self.at_s < 0:
            raise ValueError(f"a crash needs at_s >= 0, got {self}")


@dataclass(frozen=True)
class Pause:
    """Rank `rank` stands still for `seconds` when it marks step `step`."""

    rank: int
    step: int
    seconds: float

    def __post_init__(self) -> None:
        """Raise ValueError for a negative duration."""
        if self.seconds < 0:
            raise ValueError(f"a pause needs seconds >= 0, got {self}")


Fault = Crash | Pause
