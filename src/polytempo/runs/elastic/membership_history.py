"""`MembershipHistory`: which groups an elastic run had, who was lost and who came, and how long it took to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polytempo.membership.message import GroupView


class MembershipHistory:
    """What `Result.membership` and `polytempo top` show. `clock` says seconds; the first ones count as zero."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._zero_s = clock, clock()
        self.changes: list[dict[str, Any]] = []
        """Each view: when it began, who took part, what was lost, and how long it took."""
        self.events: list[dict[str, Any]] = []
        """Losses and joins in the order of time: who, how, at_s, then."""
        self.lost: list[str] = []
        """What was lost since the last view."""
        self.broken_s: float | None = None
        """Since when no step has been made because of a change."""

    @property
    def group(self) -> dict[str, Any] | None:
        """The present view."""
        return self.changes[-1] if self.changes else None

    def loses(self, who: str, how: str) -> None:
        """A process has ended."""
        self.lost.append(f"{who} {how}")
        self.breaks()
        self._note(who, how)

    def breaks(self) -> None:
        """The present group is to end."""
        self.broken_s = self.broken_s or self._clock()

    def announced(self, view: GroupView, names: Mapping[int, str]) -> None:
        """There is a new view; `names` has each member's."""
        before = set(self.changes[-1]["members"]) if self.changes else set(view.members)
        for life in view.members:
            if life not in before:
                self._note(names[life], "joined")
        for life in sorted(before - set(view.members)):
            if not any(event["who"] == names[life] and event["how"] != "joined" for event in self.events):
                self._note(names[life], "left")
        for event in self.events:
            event["then"] = event["then"] or f"{len(view.members)} workers go on after step {view.step}"
        self.changes.append(
            {
                "generation": view.generation,
                "step": view.step,
                "members": list(view.members),
                "joined": len(view.members) - view.stateful if view.stateful else 0,
                "lost": self.lost,
                "seconds": None,
            }
        )
        self.lost = []

    def formed(self, generation: int) -> None:
        """The view of that generation has applied a step."""
        if self.changes and self.changes[-1]["generation"] == generation and self.broken_s is not None:
            self.changes[-1]["seconds"] = self._clock() - self.broken_s
            self.broken_s = None

    def _note(self, who: str, how: str) -> None:
        self.events.append({"who": who, "how": how, "at_s": self._clock() - self._zero_s, "then": ""})
