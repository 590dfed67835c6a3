"""`RunEvents`: what became of a run's processes while it went on, for its progress, its result and its report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST_EVENTS = 200


class RunEvents:
    """Processes that died or fell silent, and what followed. `say` is told each in a line of words, at once."""

    def __init__(self, say: Callable[[str], object] = lambda line: None) -> None:
        self._say = say
        self.restarts = 0
        """How many processes were started in the place of others."""
        self.events: list[dict[str, Any]] = []
        """The first of them: who, how, at_s (seconds since the run's begin), then."""

    def add(self, who: str, how: str, at_s: float, then: str) -> None:
        """`who` "was killed by SIGKILL" (`how`) at `at_s`; `then`: what followed."""
        if len(self.events) < _MOST_EVENTS:
            self.events.append({"who": who, "how": how, "at_s": round(at_s, 3), "then": then})
        self._say(f"{at_s:.1f} s: {who} {how}; {then}")

    @property
    def group(self) -> None:
        """The processes of the run are not an elastic group."""

    @property
    def facts(self) -> dict[str, Any]:
        """Its part of a result's `server`."""
        return {"events": self.events, "restarts": self.restarts}
