"""`SplitLayers`: what a strategy says of the layers that it splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from polytempo.partition.tensor.way import Way
from polytempo.partition.wires import AS_THEY_ARE, Wires

AUTO: Final = "auto"
"""In place of rules: the ways that send the fewest bytes."""


@dataclass(frozen=True)
class SplitLayers:
    """Layers by their rules, or by a plan ("auto"), over so many ranks that get the same samples."""

    rules: Mapping[str, Way] | str
    ranks: int
    sequence: bool = False
    wires: Wires = AS_THEY_ARE
    """The codecs of what the layers exchange."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number of ranks that is none, and for a plan by position."""
        if self.sequence and isinstance(self.rules, str):
            raise ValueError(
                'sequence=True needs rules: "auto" does not say which norms and dropouts are computed by position'
            )
        if type(self.ranks) is not int or self.ranks < 1:
            raise ValueError(f"parts={self.ranks!r}: a layer has parts on 1 worker or more")
