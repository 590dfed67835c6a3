"""The changes since an earlier measurement of hosts: speeds may change as much again until a run.

earlier file, new measurements ──▶ medians of later / earlier, of kernels and of messages ──▶ `spread` of the new file
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import NamedTuple

from polytempo.cluster import Cluster
from polytempo.cluster.cluster_file import KERNELS_AGAIN, MESSAGES_AGAIN, read_cluster, read_spread
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.runs.calibration.calibrate import Calibration

_BYTES, _FLOPS = 1 << 20, 1e7
"""Bytes and operations of the compared calls of kernels."""
_MESSAGE_BYTES = 64 << 10


class SpeedChange(NamedTuple):
    """Medians of later / earlier: above 1 the hosts have become slower."""

    kernels: float
    messages: float


def changed(earlier: Cluster, later: Cluster) -> SpeedChange | None:
    """The change; None for other hosts or numbers of workers, or without a kernel that was measured in both."""
    hosts = [(each.name, each.workers_per_host) for each in (earlier, later)]
    if hosts[0] != hosts[1] or earlier.speeds is None or later.speeds is None:
        return None
    before = {name: speed.seconds(KernelUse(name, 1, _BYTES, _FLOPS)) for name, speed in earlier.speeds.kernels}
    after = {name: speed.seconds(KernelUse(name, 1, _BYTES, _FLOPS)) for name, speed in later.speeds.kernels}
    kernels = [after[name] / before[name] for name in after if before.get(name) and after[name]]
    links = _message_s(earlier), _message_s(later)
    messages = [links[1][name] / links[0][name] for name in links[1] if name in links[0]]
    return SpeedChange(median(kernels), median(messages)) if kernels else None


def _message_s(cluster: Cluster) -> dict[str, float]:
    found = {"network": cluster.network.latency_s + _MESSAGE_BYTES / cluster.network.bytes_per_s}
    for name, link in cluster.collectives:
        found[name] = link.latency_s(_MESSAGE_BYTES) + _MESSAGE_BYTES / link.bytes_per_s
    return found


def compared(found: Calibration, path: Path) -> tuple[Calibration, SpeedChange | None]:
    """The calibration, with the change since the file at `path` in its spread, or the file's own change if larger.

    Unchanged without such a file, or with a file of other hosts.
    """
    try:
        earlier, known = read_cluster(path), read_spread(path)
    except ValueError:
        return found, None
    change = changed(earlier, found.cluster)
    if change is None:
        return found, None
    again = {KERNELS_AGAIN: abs(math.log(change.kernels)), MESSAGES_AGAIN: abs(math.log(change.messages))}
    kept = {name: max(value, known.get(name, 0.0)) for name, value in again.items()}
    return found._replace(spread=found.spread | kept), change
