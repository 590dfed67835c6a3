"""What the parts of a virtual world need of it: its clock, its heap, and a way to end an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from polytempo.worlds.trace import Line
from polytempo.worlds.virtual.virtual_operations import Flight


class Clockwork(Protocol):
    """The world, as its network, its mailboxes and its collectives see it."""

    now_s: float
    lost: dict[int, float]
    """When each rank died that has."""

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do `action` then."""

    def at_deadline(self, time_s: float, flight: Flight, action: Callable[[], None]) -> None:
        """Do `action` then, if the operation `flight` is not over by then."""

    def end(
        self,
        flight: Flight,
        kind: str,
        sent_bytes: int,
        value: Any,
        peer: int = -1,
        error: Exception | None = None,
    ) -> None:
        """An operation has its answer: write its line in the trace, and let it `land`."""

    def write(self, event: Line) -> None:
        """Write a line in the trace for an operation that nothing waits for, unless its rank is gone."""

    def land(self, flight: Flight, value: Any, error: Exception | None) -> None:
        """An operation has its answer: resume what waits for it."""

    def fail(self, flight: Flight, peer: int) -> None:
        """An operation needs a rank that is gone."""
