"""`DividedNames`: the layers that a strategy divides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polytempo.partition.hybrid.traffic import EXCHANGES, Exchange
from polytempo.partition.wires import AS_THEY_ARE, Wires


def names_of(given: object) -> tuple[str, ...]:
    """Names that are given one by one. ValueError where there are none, or other things."""
    names = tuple(given) if isinstance(given, Iterable) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        shown = "" if names == () and isinstance(given, Iterable) else f", got {given!r}"
        raise ValueError(f"no layer is named{shown}; give names such as 'classifier.*', or a plan's")
    return names


@dataclass(frozen=True)
class DividedNames:
    """Layers by name or pattern, divided over all ranks; each rank gets samples of its own.

    `names`: None leaves them to a plan of the model's layers, by the bytes that are sent, or by times on a `link`.
    """

    names: tuple[str, ...] | None
    exchange: Exchange = "joined"
    link: str | None = None
    wires: Wires = AS_THEY_ARE
    """The codecs of the layers' exchanges."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange={self.exchange!r}: must be one of {', '.join(EXCHANGES)}")
        if self.names is not None:
            names_of(self.names)
        if self.names is not None and self.link is not None:
            raise ValueError(f"link={self.link!r} is for layers that are planned, and these are named; leave out one")

    @property
    def ranks(self) -> int:
        """Every worker gets samples of its own."""
        return 1
