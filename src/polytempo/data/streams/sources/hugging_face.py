"""Data sets of Hugging Face `datasets` that are held as Arrow tables, in shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from polytempo.core.calls.refusals import refuse
from polytempo.data.streams.sharded_data import ShardedData
from polytempo.data.streams.sources.sample_values import check_columns, fields
from polytempo.data.streams.sources.stream_files import library

ROWS_OF_SHARD = 8192
ROWS_AT_ONCE = 512


@final
class HuggingFace(ShardedData):
    """The source that `huggingface` makes."""

    def __init__(self, dataset: Any, as_tuple: Sequence[str] | None, rows_of_shard: int) -> None:
        self._dataset, self._as_tuple, self._rows = dataset, as_tuple, rows_of_shard
        check_columns(as_tuple or (), dataset.column_names, "the data set")
        starts = range(0, len(dataset), rows_of_shard)
        if not starts:
            refuse({"data source", "no samples"}, where="the data set of Hugging Face")
        self.names = [f"rows from {start}" for start in starts]
        self.counts = [min(rows_of_shard, len(dataset) - start) for start in starts]

    @property
    def identity(self) -> object:
        """The columns and the number of rows. The library's own fingerprint is drawn by chance in some transforms."""
        return ["huggingface", sorted(self._dataset.column_names), self._as_tuple and list(self._as_tuple)]

    @property
    def content_mark(self) -> str | None:
        """The library's fingerprint of a data set in files. A drawn fingerprint comes with new files."""
        return self._dataset._fingerprint if self._dataset.cache_files else None

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[dict[str, Any]]:
        """The rows in `runs`, some hundred at a time, in the data set's own format."""
        first = shard * self._rows
        for run in runs:
            for start in range(first + run.start, first + run.stop, ROWS_AT_ONCE):
                columns = self._dataset[start : min(start + ROWS_AT_ONCE, first + run.stop)]
                for row in zip(*columns.values(), strict=True):
                    yield dict(zip(columns, row, strict=True))

    def decode(self, raw: dict[str, Any]) -> Any:
        """The row, or the tuple of its fields."""
        return fields(raw, self._as_tuple, "the data set")


def huggingface(
    dataset: Any, *, as_tuple: Sequence[str] | None = None, rows_of_shard: int = ROWS_OF_SHARD
) -> HuggingFace:
    """A `datasets.Dataset` as shards of `rows_of_shard` consecutive rows, which are read some hundred at a time.

        source = pt.data.huggingface(load_dataset("org/name", split="train").with_format("torch"))

    `pt.shard` and jobs take a `datasets.Dataset` as it is, too: they then index the rows of each batch, in an order
    over the whole data set. As shards, the rows are read in stretches, which suits tables larger than memory and tables
    on a disk that is far away. Samples have the data set's own format and transform; `with_format("torch")` gives
    tensors. `as_tuple`: samples are tuples of these columns.

    Errors: `Incompatible`, a ValueError with a code: PT2605 (a column is missing), PT2606 (no rows); TypeError for a
    streaming data set, which `pt.shard` takes as it is, or for all splits of a data set together.
    """
    datasets = library("datasets", "datasets", "huggingface")
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"huggingface takes a datasets.Dataset, not a {type(dataset).__name__}; give a streaming data set to "
            "pt.shard as it is, and of a DatasetDict one split"
        )
    return HuggingFace(dataset, as_tuple, rows_of_shard)
