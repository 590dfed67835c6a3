"""Scores off the clock: in the virtual world, and in a replay, where all shards are in this process.

on_entry of the last copy of each shard ─▶ 96 batches are decided: a copy of its weights ─▶ of all shards ─▶ a score

No op is performed, no message sent and no time passes, so a run with scores is the run without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from polytempo.server.layout import Spans, numel_of, place_
from polytempo.server.message import Entry
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.score_snapshots import ScorePoints
from polytempo.server.tensors.running_statistics import RunningOf, of_first
from polytempo.training.served.scorer import Scorer


class OffTheClock:
    """Scores the shards' weights at `points`, and gives each row to `take`. `now_s()` is the time for rows."""

    def __init__(
        self,
        points: ScorePoints,
        scorer: Scorer,
        dtype: torch.dtype,
        take: Callable[[dict[str, Any]], None],
        now_s: Callable[[], float],
        running_of: RunningOf = of_first,
    ) -> None:
        self._running_of = running_of
        self._points, self._scorer, self._take, self._now_s = points, scorer, take, now_s
        self._flat = torch.empty(scorer.numel, dtype=dtype)
        self._parts: dict[int, dict[int, tuple[Spans, Tensor, Tensor | None]]] = {}
        self._scored = -1

    def watcher(self, shard: Shard, node: Callable[[], Node]) -> Callable[[int, Entry], None]:
        """An `on_entry` for `node()`, which holds `shard`."""

        def on_entry(index: int, entry: Entry) -> None:
            number = self._points.crossed(shard.decisions.batches_before, shard.decisions.batches)
            if number is not None and node().chain[-1:] == (node().node,):  # all copies have the last one's entries
                self._note(number, shard)

        return on_entry

    def begin(self, shards: Iterable[Shard]) -> None:
        """The shards' state has come from elsewhere: score it if it stands at a point."""
        for shard in shards:
            if self._points.stands(shard.decisions.batches):
                self._note(shard.decisions.batches, shard)

    def end(self, shards: Iterable[Shard]) -> None:
        """Training has come to its last batch: score that, should the copies that held it so far have died."""
        if self._scored < self._points.last:
            for shard in shards:
                self._note(self._points.last, shard)

    def _note(self, number: int, shard: Shard) -> None:
        held = shard.hold()
        parts = self._parts.setdefault(number, {})
        parts[shard.number] = held.spans, held.values.clone(), held.running
        held.release()
        if number <= self._scored or sum(numel_of(spans) for spans, _, _ in parts.values()) != self._flat.numel():
            return
        for spans, values, _ in parts.values():
            place_(self._flat, spans, values)
        running = self._running_of({number: part[2] for number, part in parts.items()})
        self._scored = number
        self._parts = {other: kept for other, kept in self._parts.items() if other > number}
        self._take(self._scorer.row(number, self._now_s(), self._flat, running))
