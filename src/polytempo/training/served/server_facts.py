"""A run's report about its parameter server: staleness of gradients, and its workers' steps and waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polytempo.core.rule import Service
from polytempo.server.message import Statistics
from polytempo.training.served.worker_program import Attendance


def facts_of(
    service: Service, statistics: Sequence[Statistics], attendances: Sequence[Attendance], bytes_sent: int
) -> dict[str, Any]:
    """The `server` field of a `Result`, ready for JSON. `bytes_sent`: by all copies of all shards.

    Staleness is counted where it arises, so a gradient counts once in each shard; so do those dropped and refused.
    Facts about a worker cover its last life: a killed worker leaves nothing.
    """
    staleness = Counter[int]()
    for shard in statistics:
        staleness.update(shard.staleness)
    return {
        "shards": service.shards,
        "replicas": service.replicas,
        "rule": service.rule.name,
        "updates": max((shard.version for shard in statistics), default=0),
        "staleness": staleness_of(staleness),
        "dropped": sum(shard.dropped for shard in statistics),
        "refused": sum(shard.refused for shard in statistics),
        "repeated": sum(shard.repeated for shard in statistics),
        "bytes_sent": bytes_sent,
        "workers": [_worker(attendance, service) for attendance in sorted(attendances)],
    }


def staleness_of(counts: Mapping[int, int]) -> dict[str, Any]:
    """Mean, quantiles and the histogram (pairs [τ, how many gradients]) of staleness; None where nothing was pushed."""
    histogram = sorted((int(tau), int(count)) for tau, count in counts.items() if count)
    total = sum(count for _, count in histogram)
    return {
        "mean": sum(tau * count for tau, count in histogram) / total if total else None,
        "p50": _quantile(histogram, total, 0.5),
        "p99": _quantile(histogram, total, 0.99),
        "histogram": [list(pair) for pair in histogram],
    }


def _quantile(histogram: Sequence[tuple[int, int]], total: int, part: float) -> int | None:
    """The least τ that at least `part` of all gradients do not exceed."""
    seen = 0
    for tau, count in histogram:
        seen += count
        if seen >= part * total:
            return tau
    return None


def _worker(attendance: Attendance, service: Service) -> dict[str, Any]:
    seconds = attendance.end_s - attendance.begin_s
    helps = {"slices_helped": attendance.helped, "slices_given": attendance.given}
    return {
        "worker": attendance.worker,
        "steps": attendance.steps,
        "samples": attendance.samples,
        "samples_per_s": attendance.samples / seconds if seconds > 0 else 0.0,
        "idle_share": min(1.0, attendance.idle_s / seconds) if seconds > 0 else 0.0,
        **(helps if service.reassigns is not None else {}),
    }
