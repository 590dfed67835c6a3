"""`mapped` and `filtered`: a source through a function of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import msgspec
import numpy as np

from polytempo.core.calls.refusals import refuse
from polytempo.data.streams.sharded_data import DerivedData, ShardedData, runs_of
from polytempo.data.streams.sources.kept_index import KEPT_FROM_SAMPLES, PartToCount, counted


@final
class Mapped(DerivedData):
    """The source that `mapped` makes."""

    def __init__(self, source: ShardedData, function: Callable[[Any], Any], version: str) -> None:
        self._source, self._function = source, function
        self.names, self.counts, self.reading = source.names, source.counts, source.reading
        self.identity_of_function = [_name(function), version]

    @property
    def identity(self) -> object:
        """The source's, and the function's name and version."""
        return ["mapped", self._source.fingerprint, self.identity_of_function]

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[Any]:
        """The source's."""
        return self._source.read(shard, runs)

    def decode(self, raw: Any) -> Any:
        """The function of the source's sample."""
        return self._function(self._source.decode(raw))


class _Kept(msgspec.Struct, frozen=True):
    numbers: bytes
    """int64: the samples of a shard that are kept."""


@final
class Filtered(DerivedData):
    """The source that `filtered` makes."""

    def __init__(self, source: ShardedData, keep: Callable[[Any], bool], version: str) -> None:
        self._source, self._keep, self._function = source, keep, [_name(keep), version]
        self.reading = source.reading
        key = f"filtered\n{source.fingerprint}\n{source.content_mark}\n{self._function}"
        keeps = bool(version) and source.content_mark is not None and len(source) >= KEPT_FROM_SAMPLES
        parts = [
            PartToCount(f"{key}\n{shard}", lambda shard=shard: self._count(shard), keep=keeps)  # type: ignore[misc]
            for shard in range(len(source.counts))
        ]
        self._kept = [np.frombuffer(kept.numbers, np.int64) for kept in counted(parts, _Kept)]
        self.names, self.counts = source.names, [len(kept) for kept in self._kept]
        if not any(self.counts):
            refuse({"data source", "no samples"}, where=f"filtered by {self._function[0]}")

    @property
    def identity(self) -> object:
        """The source's, and the function's name and version."""
        return ["filtered", self._source.fingerprint, self._function]

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[Any]:
        """The kept samples in `runs`."""
        numbers = [int(number) for run in runs for number in self._kept[shard][run.start : run.stop]]
        yield from self._source.read(shard, runs_of(numbers))

    def decode(self, raw: Any) -> Any:
        """The source's sample."""
        return self._source.decode(raw)

    def _count(self, shard: int) -> _Kept:
        samples = map(self._source.decode, self._source.read(shard, [range(self._source.counts[shard])]))
        numbers = [number for number, sample in enumerate(samples) if self._keep(sample)]
        return _Kept(np.array(numbers, np.int64).tobytes())


def _name(function: Callable[..., Any]) -> str:
    """The function's module and name, or its class's."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def mapped(source: ShardedData, function: Callable[[Any], Any], *, version: str = "") -> Mapped:
    """The source with `function` of each sample in its place: to tokenize, to decode, to augment.

        source = pt.data.mapped(pt.data.json_lines("corpus/*.jsonl"), tokenize)

    `function` is called when a sample is handed out, in the loader's worker process where there are some; it may draw
    random numbers. A saved position names it by its module and name and by `version`: give another version where its
    answers become others.
    """
    return Mapped(source, function, version)


def filtered(source: ShardedData, keep: Callable[[Any], bool], *, version: str = "") -> Filtered:
    """The samples of the source for that `keep(sample)` is true.

    An epoch needs their number before it begins, so `keep` is called once for each sample of the source: a pass over
    the data in each process. With a `version`, and 10,000 samples or more of a source with a `content_mark`, as files
    have, processes share this pass, and the cache folder (`$POLYTEMPO_CACHE`) keeps its result for the same data, the
    same functions by their names, and the same version: give another version where a function changes.

    Errors: PT2606 where no sample is kept.
    """
    return Filtered(source, keep, version)
