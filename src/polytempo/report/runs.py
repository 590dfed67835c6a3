"""`RunRecord`: everything a report needs to know about one run, read back from its folder; and short names of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from polytempo.core.system import files
from polytempo.core.system.files import EVENTS, METRICS, RESULT
from polytempo.core.system.url_path import Place
from polytempo.report.status.records import LoggedImage, StreamRecord, record_of
from polytempo.report.status.rows import METRIC_KINDS, read_rows
from polytempo.spec.result import Result
from polytempo.worlds.trace import Event

_LOGGED = frozenset({"log", "text", "image", "diagnosis"})
_HAPPENED = frozenset({"fault", "group", "diagnosis"})
_MOST_PICTURES, _MOST_PICTURE_BYTES = 12, 256 << 10
"""Bounds of one page."""
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_TYPES: dict[str, Any] = get_type_hints(Result) | {
    "workers": Annotated[int, msgspec.Meta(ge=1, le=1 << 20)],
    "steps": _Count,
    "epochs": Annotated[float, msgspec.Meta(ge=0, le=1e300)],
    "samples": _Count,
    "batch_size": Annotated[int, msgspec.Meta(ge=1, lt=2**53)],
    "seed": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    "seconds": _Seconds,
    "samples_per_s": Annotated[float, msgspec.Meta(ge=0, le=1e300)],
    "bytes_sent_per_rank": Annotated[float, msgspec.Meta(ge=0, le=1e300)],
}
"""Types of a result's entries. A result of an earlier version may lack some."""


class Picture(NamedTuple):
    """The last picture of a name."""

    name: str
    step: int
    content: bytes
    """A PNG file."""


class RunRecord(NamedTuple):
    """One run: its `result.json`, the rows of its `metrics.jsonl` and the events of its `trace.json`."""

    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    events: list[Event]
    dropped: int = 0
    """Operations at the beginning that the trace does not hold."""
    logged: Sequence[StreamRecord] = ()
    """The user's own numbers and texts; faults, groups and diagnoses."""
    pictures: Sequence[Picture] = ()
    name: str = ""
    """The user's own name for it, which tells runs with equal strategies and workers apart."""

    @property
    def simulated(self) -> bool:
        """True if its seconds are of a virtual clock."""
        return bool(self.result.get("world") == "virtual")

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The metrics of one kind, "train" or "test"."""
        return [row for row in self.metrics if row.get("kind") == kind]


def load_run(folder: Place) -> RunRecord:
    """Read the run that left `folder`. Metrics and trace may be missing, the result may not."""
    result = load_result(folder)
    trace = folder / "trace.json"
    events, dropped = read_events(trace) if trace.is_file() else ([], 0)
    rows = read_rows(folder)
    own = [row for row in rows if row.get("kind") in _LOGGED]
    with as_written(folder / METRICS, "a logged row"):
        logged = [found for row in own if (found := record_of(row)) is not None]
    told = [row for row in read_rows(folder, EVENTS) if row.get("kind") in _HAPPENED]
    with as_written(folder / EVENTS, "an event"):
        logged += [found for row in told if (found := record_of(row)) is not None]
    return RunRecord(
        result,
        [row for row in rows if row.get("kind") in METRIC_KINDS],
        *(events, dropped),
        logged=tuple(each for each in logged if not isinstance(each, LoggedImage)),
        pictures=_pictures(folder, logged),
    )


def _pictures(folder: Place, logged: Sequence[StreamRecord]) -> tuple[Picture, ...]:
    """The last picture of each of the first names that can be read and has a page's size."""
    last = {each.name: each for each in logged if isinstance(each, LoggedImage)}
    found = list[Picture]()
    for each in list(last.values())[:_MOST_PICTURES]:
        with suppress(OSError):
            content = files.read(folder / each.path, _MOST_PICTURE_BYTES + 1)
            if len(content) <= _MOST_PICTURE_BYTES and content.startswith(b"\x89PNG\r\n"):
                found.append(Picture(each.name, each.step, content))
    return tuple(found)


def has_result(folder: Place) -> bool:
    """True if a run has left its result in `folder`."""
    return (folder / RESULT).is_file()


def load_result(folder: Place) -> dict[str, Any]:
    """The `result.json` in `folder`. ValueError where there is none, or it is damaged."""
    path = folder / RESULT
    if not path.is_file():
        raise ValueError(f"{folder} holds no {RESULT}; name the folder of a run that has finished")
    result = files.parsed(path)
    if not isinstance(result, dict) or not {"world", "strategy"} <= set(result):
        raise ValueError(f"{path} is not a run's result; it cannot be mended, so begin the run again")
    for name in result.keys() & _TYPES.keys():
        with as_written(path, name):
            msgspec.convert(result[name], _TYPES[name])
    return result


@contextmanager
def as_written(path: Place, where: str) -> Iterator[None]:
    """ValueError that names the file, and `where` in it, for errors of reading a file that no run has written."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError, ValueError) as error:
        raise ValueError(
            f"{path}, {where}: {type(error).__name__}: {error}; no run has written this, so begin the run again"
        ) from error


def read_events(path: Place) -> tuple[list[Event], int]:
    """The events of a Chrome trace that `worlds.trace` has written, and how many before them were left out."""
    trace = files.parsed(path)
    with as_written(path, "traceEvents"):
        found = [line for line in trace["traceEvents"] if line["ph"] == "X"]
        events = [
            Event(
                rank=line.pid,
                step=line.args.step,
                op=line.name,
                bytes=line.args.bytes,
                start_s=line.ts / 1e6,
                end_s=(line.ts + line.dur) / 1e6,
                peer=line.args.peer,
            )
            for line in msgspec.convert(found, list[_TraceLine])
        ]
        return events, msgspec.convert(trace.get("otherData", {}).get("dropped", 0), int)


class _OpArguments(msgspec.Struct):
    step: _Count
    bytes: int
    peer: int


class _TraceLine(msgspec.Struct):
    """A line of an operation."""

    pid: _Count
    name: str
    ts: Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
    dur: Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
    args: _OpArguments


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A different name for every run: its strategy in full, and only where needed the workers and a number."""
    return _different([str(run.result["strategy"]) for run in runs], runs)


def short_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Labels with only the arguments that tell strategies of one name apart.

    `local_sgd(period=8, route=native)` alone is `local_sgd`; beside `local_sgd(period=16, route=native)` it is
    `local_sgd(period=8)`.
    """
    calls = [str(run.result["strategy"]) for run in runs]
    return _different([short_call(call, calls) for call in calls], runs)


def arguments(call: str) -> tuple[str, list[str]]:
    """The name and the arguments of a call as text: `f(a=1, b=g(2, 3))` is `("f", ["a=1", "b=g(2, 3)"])`."""
    name, opened, rest = call.partition("(")
    if not opened or not rest.endswith(")"):
        return call, []
    found, depth = [""], 0
    for letter in rest[:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return call, []
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return name, [argument.strip() for argument in found if argument.strip()]


def short_call(call: str, calls: Sequence[str]) -> str:
    """The name of a call, with the arguments that tell it from the other `calls` of that name."""
    name, own = arguments(call)
    others = [given for other, given in map(arguments, calls) if other == name]
    telling = [argument for argument in own if not all(argument in given for given in others)]
    return f"{name}({', '.join(telling)})" if telling else name


def _different(names: list[str], runs: Sequence[RunRecord]) -> list[str]:
    names = [name + (" (simulated)" if run.simulated else "") for name, run in zip(names, runs, strict=True)]
    sizes = [int(run.result["workers"]) for run in runs]
    sizes_of = {name: {size for other, size in zip(names, sizes, strict=True) if other == name} for name in names}
    names = [
        f"{name}, {plural(size, 'worker')}" if len(sizes_of[name]) > 1 else name
        for name, size in zip(names, sizes, strict=True)
    ]
    counts = Counter(names)
    names = [f"{n}, {run.name}" if counts[n] > 1 and run.name else n for n, run in zip(names, runs, strict=True)]
    counts, seen, different = Counter(names), Counter[str](), []
    for name in names:
        seen[name] += 1
        different.append(name if counts[name] == 1 else f"{name} #{seen[name]}")
    return different


def plural(count: int, noun: str) -> str:
    """`plural(1, "worker")` is `1 worker`, `plural(2, "worker")` is `2 workers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
