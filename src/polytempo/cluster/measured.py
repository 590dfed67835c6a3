"""`Measured`: links and speeds of real hosts, the cluster that a simulation takes for them, and the file with both.

    polytempo doctor --engine ssh:n1,n2 --out measured.toml      measures links and one speed, and writes the file
    polytempo calibrate --workers 2 --out cluster.toml           measures kernels, collectives and stragglers, too
    polytempo simulate digits --cluster cluster.toml             reads it

A `Cluster` has hosts of equal shape, so it has the medians of the measurements; the file lists every link and host
beside them, for people, and how much measurements vary. The tables `network`, `memory`, `host`, `kernels`,
`device`, `collectives` and `stragglers` are read, and may be edited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from polytempo.cluster.cluster import Cluster, Link
from polytempo.cluster.cluster_file import END, FORMAT, VERSION
from polytempo.cluster.slow_spells import CorrelatedStragglers, steps_of

_DEVICE = ("kind", "name", "devices", "workers", "memory_bytes", "backend")
"""Keys of the table [device]."""


class MeasuredLink(NamedTuple):
    """Messages from one process to another, one way."""

    source: str
    """The host's name."""
    target: str
    latency_s: float
    bytes_per_s: float


class MeasuredHost(NamedTuple):
    """A host, and its share for each of its processes while all of them compute."""

    name: str
    workers: int
    flops_per_s: float


class Measured(NamedTuple):
    """Measurements of hosts and links."""

    engine: str
    hosts: tuple[MeasuredHost, ...]
    between: tuple[MeasuredLink, ...]
    """Links between each pair of hosts, both ways; none for one host."""
    within: tuple[MeasuredLink, ...]
    """Links of two processes on one host; none where every host has one."""


def cluster_of(measured: Measured) -> Cluster:
    """The medians. Without a measurement the defaults of `Cluster` stand, and one host's network is its memory."""
    default = Cluster(network=Link(1e-6, 10e9))
    memory = _median(measured.within) or default.memory
    workers = max(host.workers for host in measured.hosts)
    return Cluster(
        network=_median(measured.between) or memory,
        memory=memory,
        workers_per_host=workers,
        flops_per_s=median(host.flops_per_s for host in measured.hosts),
        name=f"measured({measured.engine}, {len(measured.hosts)} hosts)",
    )


def _median(links: tuple[MeasuredLink, ...]) -> Link | None:
    if not links:
        return None
    return Link(median(link.latency_s for link in links), median(link.bytes_per_s for link in links))


def to_toml(
    cluster: Cluster,
    measured: Measured | None = None,
    spread: Mapping[str, float] | None = None,
    host_hour: float | None = None,
) -> str:
    """The file's text; `from_toml` makes an equal cluster of it. Measurements are listed behind it, and before them the
    spread, and the price of a host for an hour.

    Only measured stragglers are in it (`--stragglers` says others). Errors: ValueError for servers or faults.
    """
    if cluster.servers or cluster.faults:
        raise ValueError(f"{cluster.name} has servers or faults, which a file of a cluster cannot hold")
    lines = [
        f'format = "{FORMAT}"',
        f"version = {VERSION}",
        f"name = {json.dumps(cluster.name)}",
        "",
        "[network]  # between hosts, each way",
        *_link(cluster.network),
        "",
        "[memory]  # within a host",
        *_link(cluster.memory),
        "",
        "[host]",
        f"workers = {cluster.workers_per_host}",
        f"flops_per_s = {cluster.flops_per_s!r}  # of each worker, while all compute",
    ]
    if cluster.cores is not None:
        lines.append(f"cores = {cluster.cores}  # which workers and servers share")
    if cluster.hosts_per_machine != 1:
        lines.append(f"hosts_per_machine = {cluster.hosts_per_machine}  # which share its cores")
    if cluster.server_flops_per_s is not None:
        lines.append(f"server_flops_per_s = {cluster.server_flops_per_s!r}")
    lines += _tables(cluster)
    if host_hour is not None:
        lines += ["", "[price]", f"host_hour = {host_hour!r}"]
    if spread:
        lines += ["", "[spread]  # (90th percentile - 10th percentile) / median of the measurements"]
        lines += [f"{json.dumps(name)} = {value!r}" for name, value in spread.items()]
    for host in measured.hosts if measured is not None else ():
        lines += ["", "[[measured.hosts]]", f"name = {json.dumps(host.name)}"]
        lines += [f"workers = {host.workers}", f"flops_per_s = {host.flops_per_s!r}"]
    for kind in ("between", "within"):
        links: tuple[MeasuredLink, ...] = () if measured is None else getattr(measured, kind)
        for link in links:
            lines += ["", f"[[measured.{kind}]]", f"source = {json.dumps(link.source)}"]
            lines += [f"target = {json.dumps(link.target)}", *_link(Link(link.latency_s, link.bytes_per_s))]
    return "\n".join([*lines, "", f"{END}  # without it the file was cut off", ""])


def _link(link: Link) -> list[str]:
    lines = [f"latency_s = {link.latency_s!r}", f"bytes_per_s = {link.bytes_per_s!r}"]
    return lines if link.duplex == 1 else [*lines, f"duplex = {link.duplex!r}  # 1: full, 0.5: shared"]


def _tables(cluster: Cluster) -> list[str]:
    lines: list[str] = []
    device = cluster.device
    if device is not None:
        lines += ["", "[device]  # of each host", *(f"{key} = {json.dumps(getattr(device, key))}" for key in _DEVICE)]
    of_device = None if device is None else device.speeds
    given = {"kernels": cluster.speeds, "server_kernels": cluster.server_speeds, "device_kernels": of_device}
    for name, speeds in given.items():
        for kernel, speed in () if speeds is None else speeds.kernels:
            lines += ["", f"[[{name}]]", f"name = {json.dumps(kernel)}"]
            lines += [f"{key} = {value!r}" for key, value in speed._asdict().items()]
    for name, speeds in {"jobs": cluster.speeds, "device_jobs": of_device}.items():
        for pace in () if speeds is None else speeds.jobs:
            lines += ["", f"[[{name}]]  # steps take so many times the kernels' time", f"name = {json.dumps(pace.job)}"]
            lines += [f"parameters = {pace.parameters}", f"pace = {pace.pace!r}", f"workers = {pace.workers}"]
    between = () if device is None else device.collectives
    for name, links in {"collectives": cluster.collectives, "device_collectives": between}.items():
        for kind, link in links:
            lines += ["", f"[[{name}]]", f"name = {json.dumps(kind)}"]
            lines += [f"bytes_per_s = {link.bytes_per_s!r}", f"sizes = {list(link.sizes)!r}"]
            lines += [f"latencies_s = {list(link.latencies_s)!r}"]
    for name, stragglers, when in (
        ("stragglers", cluster.stragglers, ""),
        ("busy_stragglers", cluster.busy_stragglers, ", while other programs compute"),
    ):
        steps = steps_of(stragglers) if isinstance(stragglers, CorrelatedStragglers) else None
        if steps is not None:
            lines += ["", f"[{name}]  # factors on the time of a step, from the least to the most{when}"]
            lines += [f"quantiles = {list(steps[0])!r}", f"correlation = {steps[1]!r}  # of a step with the next"]
    return lines
