"""`RepeatedReads`: how often the data are read where several workers share them, told before a run begins.

file of .gz       ━━━━━━━━━━━━━━━━━━━━━━━━━━━━
stretch 1         ━━━━━━━━━━━┤
stretch 2         ┄┄┄┄┄┄┄┄┄┄┄├━━━━━━━━━━━━━━━     read from its beginning, so the part before is read twice

A run with L stretches (workers × interleave) has L - 1 ends between two of them. In the mean each repeats half a block
(a row group, a compressed file) and a window of samples that are shuffled among each other:

    times = 1 + (L - 1) · (1 / (2 · blocks) + window / samples), and at most L
    worst = 1 + (L - 1) · (1 / blocks + window / samples), of equal blocks
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from polytempo.data.shard import DataShard
from polytempo.data.streams.sharded_data import ShardedData

MOST_TIMES = 1.1
"""More is worth a note."""
FEW = 1000
"""Data of fewer samples are a trial, and read in no time."""


class RepeatedReads(NamedTuple):
    """The facts of a source that decide it; plain numbers."""

    samples: int | None
    """None: a stream without a length."""
    blocks: float | None
    """See `ShardedData.blocks`; None for data in memory. Of a stream, the shards that it can be divided into."""
    interleave: int = 1
    window: int = 0

    def times(self, workers: int) -> float:
        """The data that all workers read in an epoch, relative to the data."""
        if self.samples is None:
            return 1.0 if self.blocks is not None and self.blocks >= max(2, workers) else workers
        if self.blocks is None:
            return 1.0
        stretches = min(workers * self.interleave, self.samples)
        return min(stretches, 1 + (stretches - 1) * (0.5 / self.blocks + self.window / self.samples))

    def note(self, workers: int) -> str:
        """The reason and the remedy where data are read more than `MOST_TIMES` times; else ""."""
        times = self.times(workers)
        if times <= MOST_TIMES or (self.samples is not None and self.samples < FEW):
            return ""
        if self.samples is None:
            return (
                f"each of {workers} ranks reads all of this stream; pt.data.counted([stream, …]) or a stream with "
                f"num_shards and shard(num_shards=, index=), {workers} shards or more, is read in parts"
            )
        assert self.blocks is not None
        ends, remedies = workers * self.interleave - 1, list[str]()
        if self.interleave > 1:
            fewer = self._replace(interleave=1)
            remedies.append(f"shuffled(interleave=1) reads {fewer.times(workers):.1f} times")
        if 0.5 / self.blocks >= 0.5 * (MOST_TIMES - 1) / ends:
            enough = ceil(0.5 * ends / (0.5 * (MOST_TIMES - 1)))
            remedies.append(f"write {enough:,} files or row groups, or more, in place of {self.blocks:,.0f}")
        if self.window / self.samples >= 0.5 * (MOST_TIMES - 1) / ends:
            fitting = int(0.5 * (MOST_TIMES - 1) / ends * self.samples) * self.interleave
            remedies.append(f"shuffled(buffer={max(1, fitting)}) has windows that fit the data")
        workers_read = f"{workers} workers read" if workers > 1 else "1 worker reads"
        return f"{workers_read} about {times:.1f} times the data in an epoch; {'; '.join(remedies)}"


def repeated_reads(shard: DataShard) -> RepeatedReads:
    """The facts of a shard's source."""
    data = shard.dataset
    if shard.num_samples is None:
        pieces = getattr(data, "num_shards", None) if hasattr(data, "shard") else None
        return RepeatedReads(None, pieces if isinstance(pieces, int) else None)
    if not isinstance(data, ShardedData) or data.blocks is None:
        return RepeatedReads(shard.num_samples, None)
    window = data.reading.window if shard.shuffle else 0
    return RepeatedReads(shard.num_samples, data.blocks, data.reading.interleave, window)
