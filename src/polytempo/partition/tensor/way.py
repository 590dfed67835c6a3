"""`Way`: the division of one layer. Names stand for the ways without options. `SplitLayers`: the ways of a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from polytempo.partition.wires import AS_THEY_ARE, Wires

KINDS: Final = ("column", "row", "embedding", "vocabulary", "heads", "sequence", "scatter", "places")


@dataclass(frozen=True)
class Way:
    """One of `KINDS` with its options; made by `column`, `row`, `places`, or from a name by `way_of`."""

    kind: str
    heads: int | None = None
    packed: int = 1
    gather: bool = False
    rows: int | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        numbers = {"heads": self.heads, "packed": self.packed, "rows": self.rows, "columns": self.columns}
        for name, number in numbers.items():
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"{self.kind}({name}={number!r}): must be a whole number, at least 1")

    def __str__(self) -> str:
        shown = {each: getattr(self, each) for each in ("heads", "packed", "gather", "rows", "columns")}
        options = [f"{name}={value}" for name, value in shown.items() if value != getattr(Way("row"), name)]
        return f"{self.kind}({', '.join(options)})" if options else self.kind


def column(*, heads: int | None = None, packed: int = 1, gather: bool = False) -> Way:
    """Each rank computes some of a layer's outputs.

    `heads`: the outputs are so many heads, which are not cut. `packed`: the outputs are so many equal blocks one after
    the other, and each is split, as in a layer that computes query, key and value together (`packed=3`). `gather`: all
    ranks get all outputs; otherwise the next layers must be able to work on a part.
    """
    return Way("column", heads, packed, gather)


def row(*, heads: int | None = None) -> Way:
    """Each rank uses some of a layer's inputs, and the ranks sum. `heads` as of the column layer before it."""
    return Way("row", heads)


def places(*, rows: int | None = None, columns: int | None = None) -> Way:
    """Each rank computes some places of a picture, in a grid of so many rows and columns of areas.

    Left out, the grid is as near to a square as can be: 2 × 2 for 4 ranks. Signals of one dimension are cut along it by
    all ranks; of volumes the last two dimensions are cut.
    """
    return Way("places", rows=rows, columns=columns)


def way_of(asked: Way | str) -> Way:
    """The way of this name. ValueError names the nearest."""
    if isinstance(asked, Way):
        return asked
    if asked not in KINDS:
        close = get_close_matches(str(asked), KINDS, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"there is no way {asked!r} to split a layer{meant}; there are {', '.join(KINDS)}")
    return Way(asked)


AUTO: Final = "auto"
"""In place of rules or names: a plan chooses the ways, or the divided layers, that send the fewest bytes."""


@dataclass(frozen=True)
class SplitLayers:
    """Layers by their rules, or by a plan ("auto"), over so many ranks that get the same samples."""

    rules: Mapping[str, Way] | str
    ranks: int
    sequence: bool = False
    wires: Wires = AS_THEY_ARE
    """The codecs of the layers' exchanges."""

    def __post_init__(self) -> None:
        if self.sequence and isinstance(self.rules, str):
            raise ValueError(
                'sequence=True needs rules: "auto" does not say which norms and dropouts are computed by position'
            )
        if type(self.ranks) is not int or self.ranks < 1:
            raise ValueError(f"parts={self.ranks!r}: a layer has parts on 1 worker or more")
