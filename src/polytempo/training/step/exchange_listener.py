"""`ExchangeListener`: hears of a replica's exchanges, steps and checkpoints. `drift_watch` has the one there is."""

from __future__ import annotations

from typing import Protocol


class ExchangeListener(Protocol):
    """All ranks call its methods at the same places of their exchanges."""

    def after_exchange(self) -> None:
        """All ranks have exchanged something."""

    def after_step(self) -> None:
        """This rank has finished a step."""

    def check(self, *, buffers: bool) -> None:
        """A checkpoint is about to be written; `buffers`: it is right after a step."""

    def end(self) -> None:
        """No more steps will come."""
