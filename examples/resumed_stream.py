"""Files dealt to workers. Their number changes in the middle of an epoch: each sample once, and the files read once.

Four workers begin, three go on, five finish the epoch. The source counts the rows that all of them read. The same holds
for `pt.data.parquet`, `json_lines` and `webdataset`, which are such sources.

    python examples/resumed_stream.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

import polytempo as pt

FILES, ROWS = 12, 1000


class Files(pt.data.ShardedData):
    """A source of one's own: a row is (file, number). A real one would open a file and seek."""

    names = tuple(f"part-{number}" for number in range(FILES))
    counts = (ROWS,) * FILES
    rows_read = 0

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[torch.Tensor]:
        """The wanted rows, in one pass."""
        for run in runs:
            for row in run:
                Files.rows_read += 1
                yield torch.tensor([shard, row])


def main() -> None:
    """Take the batches of one epoch with three groups of workers."""
    data = Files().shuffled(buffer=200)
    seen: Counter[tuple[int, ...]] = Counter()
    position = None
    for workers, steps in ((4, 40), (3, 50), (5, None)):
        ranks = [pt.data.DataShard(data, rank=rank, size=workers, batch_size=32, seed=1) for rank in range(workers)]
        if position is not None:
            for rank in ranks:
                rank.load_state_dict(position)
        batches = [iter(rank) for rank in ranks]
        made = 0
        while made != steps and None not in (step := [next(each, None) for each in batches]):
            seen.update(tuple(sample) for batch in step if batch is not None for sample in batch.tolist())
            made += 1
        position = ranks[0].state_dict()
        stretches = len(position.get("left", []))
        print(f"{workers} workers, {made} steps: {seen.total():,} samples seen, {stretches} stretches left")
    once = seen.total() == len(seen) == len(data)
    print(f"each sample once: {once}; rows read: {Files.rows_read / len(data):.2f} x the data")


if __name__ == "__main__":
    main()
