"""`RunRecord`: everything a report needs to know about one run, read back from its folder."""

from __future__ import annotations

from typing import Any, NamedTuple

from polytempo.core import files
from polytempo.core.url_path import Place
from polytempo.report.metrics import read_metrics
from polytempo.worlds.trace import Event


class RunRecord(NamedTuple):
    """One run: its `result.json`, the rows of its `metrics.jsonl` and the events of its `trace.json`."""

    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    events: list[Event]
    dropped: int = 0
    """Operations at the beginning that the trace does not hold."""

    @property
    def simulated(self) -> bool:
        """Whether its seconds are those of a virtual clock."""
        return bool(self.result.get("world") == "virtual")

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The metrics of one kind, "train" or "test"."""
        return [row for row in self.metrics if row.get("kind") == kind]


def load_run(folder: Place) -> RunRecord:
    """Read the run that left `folder`. Metrics and trace may be missing, the result may not."""
    result = load_result(folder)
    metrics, trace = folder / "metrics.jsonl", folder / "trace.json"
    events, dropped = read_events(trace) if trace.is_file() else ([], 0)
    rows = read_metrics(metrics) if metrics.is_file() else []
    return RunRecord(result, rows, events, dropped)


def load_result(folder: Place) -> dict[str, Any]:
    """The `result.json` in `folder`. ValueError where there is none, or it is damaged."""
    path = folder / "result.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no result.json; name the folder of a run that has finished")
    result = files.parsed(path)
    if not isinstance(result, dict) or not {"world", "strategy"} <= set(result):
        raise ValueError(f"{path} is no run's result; it cannot be mended, so begin the run again")
    return result


def read_events(path: Place) -> tuple[list[Event], int]:
    """The events of a Chrome trace that `worlds.trace` has written, and how many before them were left out."""
    trace = files.parsed(path)
    events = [
        Event(
            rank=line["pid"],
            step=line["args"]["step"],
            op=line["name"],
            bytes=line["args"]["bytes"],
            start_s=line["ts"] / 1e6,
            end_s=(line["ts"] + line["dur"]) / 1e6,
            peer=line["args"]["peer"],
        )
        for line in trace["traceEvents"]
        if line["ph"] == "X"
    ]
    return events, trace.get("otherData", {}).get("dropped", 0)
