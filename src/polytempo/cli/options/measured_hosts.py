"""A note for a simulation with more hosts than its cluster's file was measured on."""

from __future__ import annotations

import sys
from pathlib import Path

from polytempo.cluster.cluster_file import read_measured


def measured_workers(cluster: str | None) -> int | None:
    """The number of workers in the measurement of a cluster's file; None for other clusters."""
    found = _measured(cluster)
    return None if found is None else found[1]


def beyond_measured(cluster: str | None, workers: int) -> str | None:
    """A sentence where so many workers are more than the file was measured with; else None."""
    found = _measured(cluster)
    if found is None or workers <= found[1]:
        return None
    hosts, measured = found
    which = "like it, with its memory for the links between them" if hosts == 1 else "like these"
    return (
        f"{cluster} was measured with {measured} worker{'s' * (measured > 1)} on {hosts} host{'s' * (hosts > 1)}; "
        f"{workers} workers are predicted on more hosts {which}. Measure them with `polytempo calibrate --engine`."
    )


def say_beyond_measured(cluster: str | None, workers: int) -> None:
    """Say that sentence on standard error."""
    said = beyond_measured(cluster, workers)
    if said is not None:
        print(f"note: {said}", file=sys.stderr)


def _measured(cluster: str | None) -> tuple[int, int] | None:
    """Hosts and workers in the measurement of a cluster's file; None for other clusters."""
    return read_measured(Path(cluster)) if cluster is not None and cluster.endswith(".toml") else None
