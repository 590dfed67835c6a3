"""Clusters to begin with. Every number is an argument; the defaults are declared, not measured."""

from __future__ import annotations

from polytempo.cluster.cluster import Cluster, Link
from polytempo.cluster.stragglers import Stragglers, constant


def _positive(**given: float) -> None:
    """Raise ValueError, by the name that was written, for a number that is not above 0."""
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a number above 0, got {value:g}")


def _payload(bytes_per_s: float, header_share: float) -> float:
    """A link's rate without headers. Raises ValueError for a share outside [0, 1)."""
    if not 0 <= header_share < 1:
        raise ValueError(f"header_share must be in [0, 1), got {header_share:g}")
    return bytes_per_s * (1 - header_share)


def ethernet(
    gbit_per_s: float = 10.0,
    latency_us: float = 50.0,
    workers_per_host: int = 1,
    gflops: float = 10.0,
    stragglers: Stragglers | None = None,
    header_share: float = 0.0,
) -> Cluster:
    """Hosts on switched Ethernet: `gbit_per_s` each way per host, `latency_us` from process to process.

    `header_share`: of the rate that headers take; 0.045 for TCP in frames of 1,500 bytes.
    """
    _positive(gbit_per_s=gbit_per_s, gflops=gflops)
    return Cluster(
        network=Link(latency_us * 1e-6, _payload(gbit_per_s * 1e9 / 8, header_share)),
        workers_per_host=workers_per_host,
        flops_per_s=gflops * 1e9,
        stragglers=stragglers or constant(),
        name=f"ethernet(gbit_per_s={gbit_per_s:g})",
    )


def infiniband(
    gbit_per_s: float = 200.0,
    latency_us: float = 2.0,
    workers_per_host: int = 8,
    gflops: float = 100e3,
    stragglers: Stragglers | None = None,
) -> Cluster:
    """Accelerator hosts on InfiniBand or RoCE: `workers_per_host` accelerators share the host's link."""
    _positive(gbit_per_s=gbit_per_s, gflops=gflops)
    return Cluster(
        network=Link(latency_us * 1e-6, gbit_per_s * 1e9 / 8),
        memory=Link(1e-6, 200e9),
        workers_per_host=workers_per_host,
        flops_per_s=gflops * 1e9,
        stragglers=stragglers or constant(),
        name=f"infiniband(gbit_per_s={gbit_per_s:g})",
    )


def internet(
    mbit_per_s: float = 100.0,
    latency_ms: float = 20.0,
    gflops: float = 10.0,
    stragglers: Stragglers | None = None,
    header_share: float = 0.0,
) -> Cluster:
    """Volunteers or sites far apart: slow links, long delays, one worker each. `header_share`: as for `ethernet`."""
    _positive(mbit_per_s=mbit_per_s, gflops=gflops)
    return Cluster(
        network=Link(latency_ms * 1e-3, _payload(mbit_per_s * 1e6 / 8, header_share)),
        flops_per_s=gflops * 1e9,
        stragglers=stragglers or constant(),
        name=f"internet(mbit_per_s={mbit_per_s:g})",
    )


def bucket(
    mbit_per_s: float = 100.0, latency_ms: float = 20.0, gflops: float = 10.0, stragglers: Stragglers | None = None
) -> Cluster:
    """Workers that reach an object store alone, as by `pt.join_bucket`: a request is a message there and one back.

    A meeting waits for all workers, and no request fails; pauses between looks cost nothing. At a run's end all wait
    for each other once more. A strategy that pushes movements (`async_diloco`) has its log of them instead, by the
    requests that a worker makes for it: two puts, and reads of the entries since its last push.
    """
    _positive(mbit_per_s=mbit_per_s, gflops=gflops)
    return Cluster(
        network=Link(latency_ms * 1e-3, mbit_per_s * 1e6 / 8),
        flops_per_s=gflops * 1e9,
        stragglers=stragglers or constant(),
        in_bucket=True,
        name=f"bucket(mbit_per_s={mbit_per_s:g})",
    )


def one_host(
    workers: int = 64, gbyte_per_s: float = 10.0, gflops: float = 10.0, stragglers: Stragglers | None = None
) -> Cluster:
    """Up to `workers` workers on one host: messages move at `gbyte_per_s` through its memory."""
    _positive(workers=workers, gbyte_per_s=gbyte_per_s, gflops=gflops)
    memory = Link(1e-6, gbyte_per_s * 1e9)
    return Cluster(
        network=memory,
        memory=memory,
        workers_per_host=workers,
        flops_per_s=gflops * 1e9,
        stragglers=stragglers or constant(),
        name=f"one_host(gbyte_per_s={gbyte_per_s:g})",
    )
