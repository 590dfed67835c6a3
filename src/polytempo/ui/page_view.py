"""`PageView`: the part of the runs that one page shows, as a query asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from polytempo.ui.of_run.run_columns import AXES

MOST_COMPARED = 40
_Name = Annotated[str, Meta(max_length=1_000)]
_Number = Annotated[float, Meta(ge=-1e300, le=1e300)]


class PageView(msgspec.Struct, frozen=True, kw_only=True):
    """A page's view. Two pages with equal views get the same answer, which is made once."""

    kind: Literal["runs", "run", "compare", "log"] = "runs"
    runs: tuple[_Name, ...] = ()
    axis: str = "seconds"
    pixels: Annotated[int, Meta(ge=50, le=4_000)] = 600
    begin: _Number | None = None
    """The first x that is shown, and below the last; None: all."""
    end: _Number | None = None
    log: _Name = ""
    search: Annotated[str, Meta(max_length=200)] = ""

    def __post_init__(self) -> None:
        """Refuse views of nothing."""
        if self.axis not in AXES:
            raise ValueError(f"axis {self.axis!r}: choose {', '.join(AXES)}")
        if len(self.runs) > MOST_COMPARED:
            raise ValueError(f"{len(self.runs)} runs: at most {MOST_COMPARED} are compared; choose fewer")
        if self.kind != "runs" and not self.runs:
            raise ValueError(f"a view of kind {self.kind!r} names a run")


def view_of(query: Mapping[str, str], runs: list[str]) -> PageView:
    """The view that a query asks for. ValueError for an impossible one."""
    given: dict[str, object] = {name: query[name] for name in ("kind", "axis", "log", "search") if name in query}
    numbers = {name: float(query[name]) for name in ("begin", "end") if query.get(name)}
    pixels = {"pixels": int(query["pixels"])} if "pixels" in query else {}
    return msgspec.convert({**given, **numbers, **pixels, "runs": runs}, PageView)
