"""`LifeStarter`: what an elastic run asks of who starts its processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from polytempo.engines.engine import EngineProcess, Role


class LifeStarter(Protocol):
    """Starts processes on hosts by name, sees them end, and ends them."""

    def begin(self, name: str, slots: int) -> None:
        """Get ready for processes on a host with so many slots; it does not wait."""

    def is_open(self, name: str) -> bool:
        """Whether processes can be started there."""

    def problem(self, name: str) -> Exception | None:
        """Why they cannot; the next `begin` tries again."""

    def start(self, name: str, role: Role, label: str, environment: Mapping[str, str]) -> EngineProcess:
        """Start a process there, with these variables. `label` begins the lines of its output."""

    def poll(self, wait_s: float) -> list[EngineProcess]:
        """The processes that have ended since the last poll; waits for one at most for `wait_s`."""

    def stop(self, process: EngineProcess | None = None) -> None:
        """End one process for certain; None: all."""
