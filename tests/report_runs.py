"""Runs for tests of the report: a record of four rows and eight events, and events of steps."""

from __future__ import annotations

from typing import Any

from polytempo.report.runs import RunRecord
from polytempo.worlds.trace import Event


def record(strategy: str = "sync_sgd(route=ring)", workers: int = 2, **changed: Any) -> RunRecord:
    """A run of four rows and eight events."""
    result = {
        "strategy": strategy,
        "world": "process",
        "workers": workers,
        "steps": 4,
        "samples": 256,
        "seconds": 2.0,
        "samples_per_s": 128.0,
        "loss": 0.25,
        "accuracy": 0.975,
        "bytes_sent_per_rank": 1000,
        "parameters_sha256": "ab" * 32,
        "trace_hash": "cd" * 32,
        "job": "digits",
        "epochs": 1,
        "seed": 0,
        "batch_size": 32,
        "communication_share": 0.25,
        "threads": 1,
    }
    metrics: list[dict[str, Any]] = [
        {"kind": "train", "step": 2, "samples": 128, "seconds": 1.0, "loss": 2.0},
        {"kind": "test", "step": 2, "samples": 128, "seconds": 1.0, "loss": 1.5, "accuracy": 0.5},
        {"kind": "train", "step": 4, "samples": 256, "seconds": 2.0, "loss": 0.5},
        {"kind": "test", "step": 4, "samples": 256, "seconds": 2.0, "loss": 0.25, "accuracy": 0.975},
    ]
    return RunRecord(result | changed, metrics, steps_of(workers, range(1, 5)))


def steps_of(ranks: int, steps: range, talk_every: int = 1) -> list[Event]:
    """Each rank computes in every step, and all of them exchange in every so many-th."""
    events = []
    for step in steps:
        for rank in range(ranks):
            events.append(Event(rank, step, "compute", 0, float(step), step + 0.5))
            if ranks > 1 and step % talk_every == 0:
                events.append(Event(rank, step, "all_reduce", 500, step + 0.5, step + 1.0))
    return events
