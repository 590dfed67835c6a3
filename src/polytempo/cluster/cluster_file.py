"""The file of a cluster, as `measured.to_toml` writes it and people edit it: its tables, and how they are read.

[network] [memory]      latency_s, bytes_per_s, duplex             `Cluster.network`, `Cluster.memory`
[host]                  workers, flops_per_s, cores, …
[[kernels]]             name, call_s, byte_s, flop_s, error        `Cluster.speeds`; [[server_kernels]] likewise
[device]                kind, name, memory_bytes, …                `Cluster.device`; [[device_kernels]] as [[kernels]],
                                                                   also [[device_jobs]] and [[device_collectives]]
[[jobs]]                name, parameters, pace, workers            `Cluster.speeds.jobs`
[[collectives]]         name, bytes_per_s, sizes, latencies_s      `Cluster.collectives`; one latency_s before version 4
[stragglers]            quantiles, correlation                     `measured_steps`; [busy_stragglers] likewise
[price]                 host_hour                                  in any currency
[spread]                by name                                    (90th percentile - 10th) / median of measurements
[[measured.hosts]]      workers, …                                 hosts that were measured
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from polytempo.cluster.cluster import Cluster, Link
from polytempo.cluster.collective_link import CollectiveLink
from polytempo.cluster.computing_time import JobPace, KernelSpeed, Speeds
from polytempo.cluster.device_speeds import DeviceSpeeds
from polytempo.cluster.slow_spells import CorrelatedStragglers, measured_steps
from polytempo.cluster.stragglers import constant

FORMAT = "polytempo-cluster"
VERSION = 4
"""Files of earlier versions are read, too: the first has links and one speed, the second does not say where it ends,
and the third has one latency for messages of all sizes."""
END = "[end]"
KERNELS_AGAIN, MESSAGES_AGAIN = "kernels again", "messages again"
"""In the table of spread: by how much two measurements of the same hosts differ, |ln(median of later / earlier)|."""
JOB = "job"
"""In the table of spread: by how much a job's steps with an exchange differ from their simulation, |ln(simulated /
measured)|."""
_FIRST_WITH_END = 3
_MOST_BYTES = 16 << 20
_MOST_SHOWN = 80
_WORDS = {"int": "a whole number", "float": "a number", "str": "a text", "object": "a table", "array": "a list"}

T = TypeVar("T")
_Count = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
_NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class _Link(msgspec.Struct):
    latency_s: _NotNegative
    bytes_per_s: _Positive
    duplex: _Positive = 1.0


class _Host(msgspec.Struct):
    workers: _Count
    flops_per_s: _Positive
    cores: _Count | None = None
    hosts_per_machine: _Count = 1
    server_flops_per_s: _Positive | None = None


class _Kernel(msgspec.Struct):
    name: str
    call_s: _NotNegative
    byte_s: _NotNegative
    flop_s: _NotNegative
    error: _NotNegative


class _Device(msgspec.Struct):
    kind: str
    name: str
    devices: _Count
    workers: _Count
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    backend: str = ""


class _Job(msgspec.Struct):
    name: str
    parameters: _Count
    pace: _Positive
    workers: Annotated[int, Meta(ge=0)] = 0


class _Collective(msgspec.Struct):
    name: str
    bytes_per_s: _Positive
    sizes: tuple[float, ...] = (0.0,)
    latencies_s: tuple[float, ...] = ()
    latency_s: _NotNegative | None = None


class _Steps(msgspec.Struct):
    quantiles: tuple[float, ...]
    correlation: float


class _Price(msgspec.Struct):
    host_hour: _Positive | None = None


class _MeasuredHost(msgspec.Struct):
    workers: _Count


class _Measured(msgspec.Struct):
    hosts: tuple[_MeasuredHost, ...] = ()


class _About(msgspec.Struct):
    """Tables beside the cluster."""

    price: _Price = msgspec.field(default_factory=_Price)
    spread: dict[str, _NotNegative] = {}
    measured: _Measured = msgspec.field(default_factory=_Measured)


class _Tables(msgspec.Struct):
    network: _Link
    memory: _Link
    host: _Host
    name: str = "measured"
    kernels: tuple[_Kernel, ...] = ()
    server_kernels: tuple[_Kernel, ...] = ()
    device: _Device | None = None
    device_kernels: tuple[_Kernel, ...] = ()
    device_jobs: tuple[_Job, ...] = ()
    device_collectives: tuple[_Collective, ...] = ()
    jobs: tuple[_Job, ...] = ()
    collectives: tuple[_Collective, ...] = ()
    stragglers: _Steps | None = None
    busy_stragglers: _Steps | None = None


def from_toml(text: str, where: str = "the text") -> Cluster:
    """The cluster that `to_toml` wrote. ValueError names `where`, the key, its value and the requirement."""
    plain = _parsed(text, where)
    _check_version(plain, where)
    tables = _converted(plain, _Tables, where)
    host = tables.host
    return Cluster(
        network=_link(tables.network, f"{where}: [network]"),
        memory=_link(tables.memory, f"{where}: [memory]"),
        workers_per_host=host.workers,
        cores=host.cores,
        hosts_per_machine=host.hosts_per_machine,
        flops_per_s=host.flops_per_s,
        server_flops_per_s=host.server_flops_per_s,
        speeds=_speeds(tables.kernels, tables.jobs, where),
        server_speeds=_speeds(tables.server_kernels, (), where),
        device=_device(tables, where),
        collectives=_collectives(tables.collectives, where),
        stragglers=_stragglers(tables.stragglers, f"{where}: [stragglers]") or constant(),
        busy_stragglers=_stragglers(tables.busy_stragglers, f"{where}: [busy_stragglers]"),
        name=tables.name,
    )


def read_cluster(path: Path) -> Cluster:
    """The cluster in a file. ValueError for another file, or none."""
    if not path.is_file():
        raise ValueError(
            f"cluster {path}: there is no such file; `polytempo doctor --engine … --out {path}` or "
            f"`polytempo calibrate --out {path}` writes it"
        )
    return from_toml(_text(path), str(path))


def read_price(path: Path) -> float | None:
    """The price of a host for an hour; None where the file has none."""
    return _about(path).price.host_hour


def read_spread(path: Path) -> dict[str, float]:
    """(90th percentile - 10th percentile) / median of each measurement, by name; empty without measurements."""
    return _about(path).spread


def read_measured(path: Path) -> tuple[int, int] | None:
    """Numbers of hosts, and of workers on all of them, that took part; None if the file lists no hosts."""
    hosts = _about(path).measured.hosts
    return (len(hosts), sum(host.workers for host in hosts)) if hosts else None


def _about(path: Path) -> _About:
    return _converted(_parsed(_text(path), str(path)), _About, str(path))


def _link(table: _Link, where: str) -> Link:
    return _made(where, lambda: Link(table.latency_s, table.bytes_per_s, table.duplex))


def _speeds(kernels: tuple[_Kernel, ...], jobs: tuple[_Job, ...], where: str) -> Speeds | None:
    if not kernels:
        return None
    speeds = tuple((each.name, KernelSpeed(each.call_s, each.byte_s, each.flop_s, each.error)) for each in kernels)
    paces = tuple(JobPace(each.name, each.parameters, each.pace, each.workers) for each in jobs)
    return _made(where, lambda: Speeds(speeds, paces))


def _device(tables: _Tables, where: str) -> DeviceSpeeds | None:
    speeds, table = _speeds(tables.device_kernels, tables.device_jobs, where), tables.device
    if (table is None) != (speeds is None):
        raise ValueError(f"{where}: [device] and [[device_kernels]] belong together; write both, or measure again")
    if table is None or speeds is None:
        return None
    return _made(
        where,
        lambda: DeviceSpeeds(
            table.kind,
            table.name,
            speeds,
            memory_bytes=table.memory_bytes,
            devices=table.devices,
            workers=table.workers,
            backend=table.backend,
            collectives=_collectives(tables.device_collectives, where),
        ),
    )


def _collectives(tables: tuple[_Collective, ...], where: str) -> tuple[tuple[str, CollectiveLink], ...]:
    return tuple((each.name, _collective(each, where)) for each in tables)


def _collective(table: _Collective, where: str) -> CollectiveLink:
    latencies_s = table.latencies_s if table.latency_s is None else (table.latency_s,)
    sizes = table.sizes if table.latency_s is None else (0.0,)
    return _made(f"{where}: collectives {table.name!r}", lambda: CollectiveLink(table.bytes_per_s, sizes, latencies_s))


def _stragglers(table: _Steps | None, where: str) -> CorrelatedStragglers | None:
    return None if table is None else _made(where, lambda: measured_steps(table.quantiles, table.correlation))


def _made(where: str, make: Callable[[], T]) -> T:
    """The result of `make`; its ValueError names the place in the file."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _text(path: Path) -> str:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(
            f"cluster {path}: the file has more than {_MOST_BYTES:,} bytes; name a description of a cluster"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8; name a description of a cluster") from error


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not TOML: {error}; mend that line, or measure again") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply for a description of a cluster; measure again") from error


def _check_version(plain: Mapping[str, Any], where: str) -> None:
    """Refuse another kind of file, a file of a later release, and a file that was cut off."""
    version = plain.get("version")
    if plain.get("format") != FORMAT or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f'{where} does not describe a cluster: it must begin with format = "{FORMAT}" and version = {VERSION}; '
            "`polytempo calibrate` writes one"
        )
    if version > VERSION:
        raise ValueError(
            f"{where} has version {version}, and this release reads versions up to {VERSION}: install the release that "
            "wrote it, or measure again with `polytempo calibrate`"
        )
    if version >= _FIRST_WITH_END and END.strip("[]") not in plain:
        raise ValueError(
            f"{where} was cut off: it does not end with {END}; copy it again, or measure again with "
            "`polytempo calibrate` (in a file of your own write that line)"
        )


def _converted(plain: Mapping[str, Any], kind: type[T], where: str) -> T:
    """The tables as `kind`. ValueError names the place, the value, and the requirement."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at ")
        keys = re.findall(r"\w+", path)
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", said):
            name = ".".join([*keys, missing[1]]) if keys else f"the table [{missing[1]}]"
            raise ValueError(f"{where}: {name} is missing; write it, or measure again") from None
        place, value = _found(plain, keys)
        must = (
            said.partition(", got")[0].replace(" | null", "").replace("Number out of range", "Expected a finite number")
        )
        must = must.replace("Expected", "must be").replace(f"`float` <= {sys.float_info.max!r}", "a finite number")
        must = re.sub(r"`(\w+)`", lambda kind: _WORDS.get(kind[1], kind[0]), must)
        raise ValueError(f"{where}: {place} = {repr(value)[:_MOST_SHOWN]} {must}") from None


def _found(plain: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, Any]:
    """The value at the end of the keys, and its place: `kernels 'product'.call_s`."""
    value: Any = plain
    place = ""
    for key in keys:
        if isinstance(value, list):
            value = value[int(key)]
            place += f" {value['name']!r}" if isinstance(value, dict) and "name" in value else f"[{key}]"
        else:
            value = value[key]
            place += f".{key}" if place else key
    return place, value
