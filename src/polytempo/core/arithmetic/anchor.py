"""What a strategy remembers of earlier parameters, against which it looks at those of now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from polytempo.core.bundle import Bundle
from polytempo.core.transform import State


class AnchorState(NamedTuple):
    """The parameters at the last synchronisation, and the inner transform's state."""

    anchor: Bundle
    inner: State


def anchors(state: Any) -> Iterator[Bundle]:
    """The anchors in a state, so that who puts parameters elsewhere can let these follow."""
    if isinstance(state, AnchorState):
        yield state.anchor
    if isinstance(state, dict | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from anchors(value)
