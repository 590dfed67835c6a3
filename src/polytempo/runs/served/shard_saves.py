"""`ShardSaves`: the parts of a run's snapshots that one copy of a shard writes, in the background."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from polytempo.core import NotFinite
from polytempo.core.system.url_path import Place
from polytempo.server.layout import Parameter, Spans, describe, flat_index
from polytempo.server.pieces import split, without_tables
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.snapshot import SnapshotWriter, WrittenSnapshot
from polytempo.spec.options import RunOptions

_LONGEST_WRITE_S = 300.0


class ShardSaves:
    """The parts of the run's snapshots of a shard with `spans` of `parameters`, written in the background.

    `on_save` is for its `Node`. What is not finite is never written; without `allow_nan` NotFinite says so.
    """

    def __init__(
        self, folder: Place, shard: int, parameters: Sequence[Parameter], spans: Spans, *, allow_nan: bool
    ) -> None:
        self._snapshots, self._allow_nan = SnapshotWriter(folder, shard), allow_nan
        self._parameters, self._spans = without_tables(parameters), split(parameters, spans).dense

    def on_save(self, number: int, shard: Shard) -> None:
        """Begin snapshot `number`; should another one still be under way, that one first."""
        state, tensors = shard.dump()
        self.look()
        if not self._snapshots.begin(number, state, tensors):
            self.close()
            self._snapshots.begin(number, state, tensors)

    def look(self) -> None:
        """What has become of the one that is under way, if it is done."""
        self._say(self._snapshots.poll())

    def close(self) -> None:
        """Wait for the one that is under way."""
        self._say(self._snapshots.close(_LONGEST_WRITE_S))

    def _say(self, saved: WrittenSnapshot | None) -> None:
        if saved is None or not saved.error:
            return
        error = saved.not_finite
        if error is None or self._allow_nan:
            print(saved.error, file=sys.stderr)  # into the log of this copy
            return
        if error.index is None or error.index >= sum(span.numel for span in self._spans):
            raise error
        name = describe(self._parameters, flat_index(self._spans, error.index))
        where = f"{name} ({error.where})"
        raise NotFinite.from_facts(error.facts | {"parameter": name, "index": None, "where": where}) from error


def shard_saves(shard: int, parameters: Sequence[Parameter], spans: Spans, options: RunOptions) -> ShardSaves | None:
    """Those of a copy of `shard`; None where the run has no folder."""
    if options.out is None:
        return None
    folder = options.out.absolute() / "checkpoint"
    return ShardSaves(folder, shard, parameters, spans, allow_nan=options.allow_nan)
