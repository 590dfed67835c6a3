"""`TravellingRun`: a run as agents get it: a text, and bytes that belong to it, such as a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from polytempo.engines.engine import Launch
from polytempo.engines.remote.messages import RunData, ToAgent, Welcome
from polytempo.spec.topology import Topology

PIECE_BYTES = 32 << 20
"""So many bytes travel in one message."""


class TravellingRun(NamedTuple):
    """What agents get of a run."""

    text: str
    topology: Topology
    data: bytes = b""

    @classmethod
    def of(cls, launch: Launch) -> TravellingRun:
        """A job's. ValueError where it cannot travel."""
        if launch.spec is None:
            raise ValueError("a function cannot travel to other hosts; give engine=pt.engines.local()")
        return cls(launch.spec.to_json(), launch.spec.topology())

    def messages(self, number: int, most: int, threads: int) -> Iterator[ToAgent]:
        """To agent `number`: a `Welcome`, and its pieces."""
        starts = range(0, len(self.data), PIECE_BYTES)
        yield Welcome(number, self.text, most, threads, len(starts))
        for start in starts:
            yield RunData(self.data[start : start + PIECE_BYTES])
