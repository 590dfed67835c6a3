"""Which part of the parameters lies in which shard.

flat    [ w1 w1 w1 w1 w1 w1 | b1 | w2 w2 w2 | b2 ]         all parameters, in the model's order
spans     └── shard 0 ──┘└──── shard 1 ──────────┘        each shard has one or several ranges of it
"""

from __future__ import annotations

from typing import NamedTuple


class Parameter(NamedTuple):
    """One parameter of the model. `row_width` > 0: its gradient comes as rows of so many elements (an embedding)."""

    name: str
    numel: int
    group: int = 0
    """The optimizer's parameter group."""
    row_width: int = 0


class Span(NamedTuple):
    """The elements `begin … end-1` of the flat vector of all parameters."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.end - self.begin


Spans = tuple[Span, ...]
"""What one shard holds, ascending. Its own flat vector is these ranges one after the other."""
