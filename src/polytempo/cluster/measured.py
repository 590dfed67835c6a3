"""`Measured`: links and speeds of real hosts, the cluster that a simulation takes for them, and the file with both.

    polytempo doctor --engine ssh:n1,n2 --out measured.toml      measures links and one speed, and writes the file
    polytempo calibrate --workers 2 --out cluster.toml           measures kernels, collectives and stragglers, too
    polytempo simulate digits --cluster cluster.toml             reads it

A `Cluster` has hosts of equal shape, so it has the medians of what was measured; the file lists every link and host
beside them, for people, and how much measurements vary. The tables `network`, `memory`, `host`, `kernels`,
`collectives` and `stragglers` are what is read, and may be edited.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from polytempo.cluster import cluster_tables
from polytempo.cluster.cluster import Cluster, Link
from polytempo.cluster.stragglers import constant

FORMAT = "polytempo-cluster"
VERSION = 4
"""Files of earlier versions are read, too: the first has links and one speed, the second does not say where it ends,
and the third has one latency for messages of all sizes."""
_END, _FIRST_WITH_END = "[end]", 3
_MOST_BYTES = 16 << 20


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
    """What was measured."""

    engine: str
    hosts: tuple[MeasuredHost, ...]
    between: tuple[MeasuredLink, ...]
    """Of each pair of hosts, both ways; none for one host."""
    within: tuple[MeasuredLink, ...]
    """Of two processes on one host; none where every host has one."""


def cluster_of(measured: Measured) -> Cluster:
    """The medians. What could not be measured has the defaults of `Cluster`, and one host's network is its memory."""
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
    """The file's text, from which `from_toml` makes an equal cluster. What was measured is listed behind it, and before
    that the spread, and the price of a host for an hour.

    Of stragglers it holds those that were measured; others are left out (`--stragglers` says them). Errors: ValueError
    for servers or faults.
    """
    if cluster.servers or cluster.faults:
        raise ValueError(f"{cluster.name} has servers or faults, of which a file of a cluster says nothing")
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
    lines += cluster_tables.written(cluster)
    if host_hour is not None:
        lines += ["", "[price]", f"host_hour = {host_hour!r}"]
    if spread:
        lines += ["", "[spread]  # (90th percentile - 10th percentile) / median of what was measured"]
        lines += [f"{json.dumps(name)} = {value!r}" for name, value in spread.items()]
    for host in measured.hosts if measured is not None else ():
        lines += ["", "[[measured.hosts]]", f"name = {json.dumps(host.name)}"]
        lines += [f"workers = {host.workers}", f"flops_per_s = {host.flops_per_s!r}"]
    for kind in ("between", "within"):
        links: tuple[MeasuredLink, ...] = () if measured is None else getattr(measured, kind)
        for link in links:
            lines += ["", f"[[measured.{kind}]]", f"source = {json.dumps(link.source)}"]
            lines += [f"target = {json.dumps(link.target)}", *_link(Link(link.latency_s, link.bytes_per_s))]
    return "\n".join([*lines, "", f"{_END}  # without it the file was cut off", ""])


def _link(link: Link) -> list[str]:
    lines = [f"latency_s = {link.latency_s!r}", f"bytes_per_s = {link.bytes_per_s!r}"]
    return lines if link.duplex == 1 else [*lines, f"duplex = {link.duplex!r}  # 1: full, 0.5: shared"]


def from_toml(text: str, where: str = "the text") -> Cluster:
    """The cluster that `to_toml` wrote. ValueError names `where`, the key, its value and what it must be."""
    plain = _parsed(text, where)
    _check_version(plain, where)
    name = plain.get("name", "measured")
    if not isinstance(name, str):
        raise ValueError(f"{where}: name = {name!r} must be a text")
    host = _table(plain, "host", where)
    workers, cores = _count(host, "workers", where), _count(host, "cores", where) if "cores" in host else None
    hosts_per_machine = _count(host, "hosts_per_machine", where) if "hosts_per_machine" in host else 1
    return Cluster(
        network=_read_link(plain, "network", where),
        memory=_read_link(plain, "memory", where),
        workers_per_host=workers,
        cores=cores,
        hosts_per_machine=hosts_per_machine,
        flops_per_s=_number(host, "host", "flops_per_s", where),
        server_flops_per_s=(
            _number(host, "host", "server_flops_per_s", where) if "server_flops_per_s" in host else None
        ),
        speeds=cluster_tables.speeds_of(plain, "kernels", where, _number),
        server_speeds=cluster_tables.speeds_of(plain, "server_kernels", where, _number),
        collectives=cluster_tables.collectives_of(plain, where, _number),
        stragglers=cluster_tables.stragglers_of(plain, where) or constant(),
        busy_stragglers=cluster_tables.stragglers_of(plain, where, "busy_stragglers"),
        name=name,
    )


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is no TOML: {error}; mend that line, or measure again") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply for a description of a cluster; measure again") from error


def _check_version(plain: Mapping[str, Any], where: str) -> None:
    """Refuse what is no such file, what a later release wrote, and what was cut off."""
    version = plain.get("version")
    if plain.get("format") != FORMAT or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f'{where} is no description of a cluster: it must begin with format = "{FORMAT}" and version = {VERSION}; '
            "`polytempo calibrate` writes one"
        )
    if version > VERSION:
        raise ValueError(
            f"{where} has version {version}, and this release reads versions up to {VERSION}: install the release that "
            "wrote it, or measure again with `polytempo calibrate`"
        )
    if version >= _FIRST_WITH_END and _END.strip("[]") not in plain:
        raise ValueError(
            f"{where} was cut off: it does not end with {_END}; copy it again, or measure again with "
            "`polytempo calibrate` (in a file of your own write that line)"
        )


def read_cluster(path: Path) -> Cluster:
    """The cluster in a file. ValueError for what is no such file."""
    if not path.is_file():
        raise ValueError(
            f"cluster {path}: there is no such file; `polytempo doctor --engine … --out {path}` or "
            f"`polytempo calibrate --out {path}` writes it"
        )
    return from_toml(_text(path), str(path))


def read_tables(path: Path) -> dict[str, Any]:
    """What the TOML file of a cluster says, unchecked. ValueError for one that is none, or too large."""
    return _parsed(_text(path), str(path))


def _text(path: Path) -> str:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(
            f"cluster {path}: the file has more than {_MOST_BYTES:,} bytes; name a description of a cluster"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8; name a description of a cluster") from error


def _table(plain: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    table = plain.get(key)
    if not isinstance(table, dict):
        raise ValueError(f"{where}: there is no table [{key}]")
    return table


def _count(host: Mapping[str, Any], key: str, where: str) -> int:
    value = host.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: host.{key} = {value!r} must be a whole number above 0")
    return value


def _read_link(plain: Mapping[str, Any], key: str, where: str) -> Link:
    table = _table(plain, key, where)
    duplex = _number(table, key, "duplex", where) if "duplex" in table else 1.0
    latency_s = _number(table, key, "latency_s", where, least=0.0)
    bytes_per_s = _number(table, key, "bytes_per_s", where)
    try:
        return Link(latency_s, bytes_per_s, duplex)
    except ValueError as error:
        raise ValueError(f"{where}: [{key}]: {error}") from error


def _number(table: Mapping[str, Any], name: str, key: str, where: str, least: float | None = None) -> float:
    value = table.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value <= sys.float_info.max and (value > 0 or value == least):  # type: ignore[operator]  # a number
        return float(value)  # type: ignore[arg-type]
    needed = "above 0" if least is None else f"from {least:g}"
    raise ValueError(f"{where}: {name}.{key} = {value!r} must be a number {needed}")
