"""`Tracker`: the four calls of a library that people look at their runs with, and the numbers that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec.structs import asdict

from polytempo.report.status.records import ExchangeRow, Logged, RunFinished, StreamRecord, TestRow, TrainRow

AXES = ("epoch", "samples", "seconds")
"""Entries of rows that are axes of others."""


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a run for its trackers."""

    name: str
    """The name of its folder."""
    folder: str
    """The path of the folder, or the URL."""
    job: str
    strategy: str
    world: str
    """"process" or "virtual"."""
    workers: int
    settings: dict[str, str | int | float | bool]
    """Options and hyper-parameters, by name."""
    began_s: float
    """Seconds since 1970, of this part of the run."""
    steps: int | None = None
    """Steps until its end; None: epochs decide."""
    epochs: float | None = None
    resumed: bool = False
    """True for a run that goes on with the run in its folder."""
    identity: str = ""
    """A name that no other run of this tracker has, the same after the run was resumed."""


class Tracker(Protocol):
    """A library that shows runs. Calls come one after the other from one thread; an exception ends this tracker alone.

    class Printed:
        def start(self, facts): print(facts.name)
        def log(self, row, step): print(step, row)
        def event(self, event): print(event)
        def finish(self, status): print(status.state)
    """

    def start(self, facts: TrackedRun) -> None:
        """Begin the run, or go on with the run of this `identity`."""

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Take numbers of a row, by name (see `scalars`)."""

    def event(self, event: StreamRecord) -> None:
        """Take a fault, a group, a checkpoint, a diagnosis, a text or a picture."""

    def finish(self, status: RunFinished) -> None:
        """End the run. The state is "failed", with a reason, also where the launcher was killed."""


@runtime_checkable
class BufferingTracker(Protocol):
    """A tracker with a buffer: a kill of all processes loses its last records."""

    def kept_s(self) -> float:
        """A time of `time.monotonic`: records before it would survive. The others are given again after a resume."""


def scalars(record: StreamRecord) -> dict[str, float]:
    """The numbers of a row by name, and none for other records.

        TrainRow(step=8, loss=0.3, samples=256, worker=1)      {"train/loss/worker-1": 0.3, "samples/worker-1": 256}
        TestRow(step=8, loss=0.2, accuracy=0.9)                {"test/loss": 0.2, "test/accuracy": 0.9}
        Logged(step=8, values={"perplexity": 31.0})            {"perplexity": 31.0}
        ExchangeRow(step=8, waited_s=0.5, ops={…})             {"exchange/waited_s": 0.5, "exchange/send/bytes": 480, …}

    Lists are spread: `delays` is train/delays/0, …. Values that were not finite are null in rows, and are left out.
    """
    if isinstance(record, Logged):
        return _by_worker(record.values, record.worker)
    if isinstance(record, ExchangeRow):
        totals = ((op, name, value) for op, each in record.ops.items() for name, value in asdict(each).items())
        sums = {f"exchange/{op}/{name}": value for op, name, value in totals}
        return _by_worker({"exchange/waited_s": record.waited_s} | sums, record.worker)
    if not isinstance(record, TrainRow | TestRow):
        return {}
    plain: dict[str, Any] = msgspec.to_builtins(record)
    plain |= plain.pop("more")
    kind, worker = plain.pop("kind"), plain.pop("worker", None)
    del plain["step"]
    found: dict[str, float] = {}
    for name, value in plain.items():
        several = enumerate(value) if isinstance(value, list) else [("", value)]
        for number, each in several:
            if isinstance(each, int | float) and not isinstance(each, bool):
                entry = name if name in AXES else f"{kind}/{name}"
                found[f"{entry}/{number}" if isinstance(value, list) else entry] = each
    return _by_worker(found, worker)


def _by_worker(values: Mapping[str, float], worker: int | None) -> dict[str, float]:
    return {name if worker is None else f"{name}/worker-{worker}": value for name, value in values.items()}
