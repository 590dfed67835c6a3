"""`StorePlaces`: a worker's places in the data, for workers that share an object store alone.

batches … │ counted, in the store │ handed out, not counted yet │ …          a worker that is left out goes back to │
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polytempo.data.shard import DataShard
from polytempo.data.spans import PlaceSpan


class StorePlaces:
    """`counted`: this worker's line in the ledger, {} before the first. `trains`: True while batches have gradients."""

    def __init__(self, counted: Callable[[], dict[str, Any]], trains: Callable[[], bool]) -> None:
        self._counted, self._trains = counted, trains
        self._shard: DataShard | None = None
        """The first shard with gradients. Others, such as a validation's, are left alone."""
        self._began: dict[str, Any] = {}
        """The position of this shard at first."""
        self._spans: list[list[PlaceSpan]] = []
        """Places of the data that were handed out since the last count, by batches."""
        self._seen: list[PlaceSpan] | None = None
        """The newest batch's places: in `_spans`, or counted."""
        self._taken = 0
        self._rewinds = False

    def rewound(self, shard: DataShard) -> bool:
        """True if the shard has just gone to where the ledger stands; it is asked before each batch."""
        if self._shard is None and self._trains():
            self._shard, self._began = shard, shard.state_dict()
            self._taken, self._seen = shard.taken, shard.spans
        if self._shard is not shard:
            return False
        self._gather(shard)
        if not self._rewinds:
            return False
        self._rewinds = False
        place = self._counted().get("place")
        shard.load_state_dict(self._began if place is None else place)
        self._spans, self._taken = [], shard.taken
        return True

    def present(self) -> dict[str, Any]:
        """This worker's line in the ledger, if its samples so far count."""
        before = int(self._counted().get("samples", 0))
        if self._shard is None:
            return {"samples": before, "place": None, "spans": []}
        self._gather(self._shard)
        samples = before + self._shard.taken - self._taken
        spans = [list(span) for batch in self._spans for span in batch]
        return {"samples": samples, "place": self._shard.state_dict(), "spans": spans}

    def count(self) -> None:
        """The present line is in the ledger."""
        self._spans = []
        self._taken = 0 if self._shard is None else self._shard.taken

    def rewind(self) -> None:
        """Go back to the ledger before the next batch."""
        self._rewinds = True

    def _gather(self, shard: DataShard) -> None:
        """Note the newest batch's places. A step of several parts goes on with one list."""
        if shard.spans is not self._seen:
            self._seen = shard.spans
            self._spans.append(shard.spans)
