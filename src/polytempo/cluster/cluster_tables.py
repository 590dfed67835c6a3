"""What a file of a cluster says of kernels, collectives and stragglers: the tables behind `network`, `memory`, `host`.

[[kernels]]      name, call_s, byte_s, flop_s, error          `Cluster.speeds`; [[server_kernels]] likewise
[[jobs]]         name, parameters, pace, workers              `Cluster.speeds.jobs`
[[collectives]]  name, bytes_per_s, sizes, latencies_s        `Cluster.collectives`; one latency_s before version 4
[stragglers]     quantiles, correlation                       `slow_spells.measured_steps`; [busy_stragglers] likewise
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polytempo.cluster.cluster import Cluster, CollectiveLink
from polytempo.cluster.slow_spells import CorrelatedStragglers, measured_steps, steps_of
from polytempo.cluster.speeds import JobPace, KernelSpeed, Speeds
from polytempo.cluster.stragglers import Stragglers

Number = Callable[..., float]
"""`number(table, name, key, where, least)`: reads a number, or raises ValueError (`measured`)."""


def written(cluster: Cluster) -> list[str]:
    """The lines of the tables that this cluster has something for."""
    lines: list[str] = []
    for name, speeds in (("kernels", cluster.speeds), ("server_kernels", cluster.server_speeds)):
        for kernel, speed in () if speeds is None else speeds.kernels:
            lines += ["", f"[[{name}]]", f"name = {json.dumps(kernel)}"]
            lines += [f"{key} = {value!r}" for key, value in speed._asdict().items()]
    for pace in () if cluster.speeds is None else cluster.speeds.jobs:
        lines += ["", "[[jobs]]  # steps take so many times what the kernels say", f"name = {json.dumps(pace.job)}"]
        lines += [f"parameters = {pace.parameters}", f"pace = {pace.pace!r}", f"workers = {pace.workers}"]
    for kind, link in cluster.collectives:
        lines += ["", "[[collectives]]", f"name = {json.dumps(kind)}"]
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


def speeds_of(plain: Mapping[str, Any], key: str, where: str, number: Number) -> Speeds | None:
    """The speeds in a table of kernels; None where there is none. ValueError names what is wrong in it."""
    rows = _rows(plain, key, where)
    found = []
    for row in rows:
        name = _name(row, key, where)
        figures = (number(row, f"{key} {name!r}", each, where, 0.0) for each in KernelSpeed._fields)
        found.append((name, KernelSpeed(*figures)))
    if not found:
        return None
    try:
        return Speeds(tuple(found), _jobs(plain, where, number) if key == "kernels" else ())
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _jobs(plain: Mapping[str, Any], where: str, number: Number) -> tuple[JobPace, ...]:
    found = []
    for row in _rows(plain, "jobs", where):
        name, parameters = _name(row, "jobs", where), row.get("parameters")
        if not isinstance(parameters, int) or isinstance(parameters, bool) or parameters < 1:
            raise ValueError(f"{where}: jobs {name!r}.parameters = {parameters!r} must be a whole number above 0")
        workers = row.get("workers", 0)
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
            raise ValueError(f"{where}: jobs {name!r}.workers = {workers!r} must be a whole number from 0")
        found.append(JobPace(name, parameters, number(row, f"jobs {name!r}", "pace", where), workers))
    return tuple(found)


def collectives_of(plain: Mapping[str, Any], where: str, number: Number) -> tuple[tuple[str, CollectiveLink], ...]:
    """The links in the table of collectives."""
    found = []
    for row in _rows(plain, "collectives", where):
        name = _name(row, "collectives", where)
        what = f"collectives {name!r}"
        bytes_per_s = number(row, what, "bytes_per_s", where)
        lists: list[Any] = [row.get("sizes"), row.get("latencies_s")]
        if "latency_s" in row:
            lists = [[0.0], [number(row, what, "latency_s", where, 0.0)]]
        if not all(isinstance(values, list) and all(map(_is_number, values)) for values in lists):
            raise ValueError(f"{where}: {what} needs sizes and latencies_s, each a list of numbers")
        sizes, latencies_s = (tuple(map(float, values)) for values in lists)
        try:
            found.append((name, CollectiveLink(bytes_per_s, sizes, latencies_s)))
        except ValueError as error:
            raise ValueError(f"{where}: {what}: {error}") from error
    return tuple(found)


def stragglers_of(plain: Mapping[str, Any], where: str, name: str = "stragglers") -> Stragglers | None:
    """The distribution in the table of that name; None where there is none."""
    table = plain.get(name)
    if table is None:
        return None
    quantiles: Any
    correlation: Any
    quantiles, correlation = (
        table.get(key) if isinstance(table, dict) else None for key in ("quantiles", "correlation")
    )
    if not isinstance(quantiles, list) or not all(_is_number(each) for each in [*quantiles, correlation]):
        raise ValueError(f"{where}: [{name}] needs quantiles, a list of numbers, and correlation, a number")
    try:
        return measured_steps(tuple(float(each) for each in quantiles), float(correlation))
    except ValueError as error:
        raise ValueError(f"{where}: [{name}]: {error}") from error


def _rows(plain: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    rows = plain.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{where}: {key} must be tables, each headed by [[{key}]]")
    return rows


def _name(row: Mapping[str, Any], key: str, where: str) -> str:
    name = row.get("name")
    if not isinstance(name, str):
        raise ValueError(f"{where}: {key}: name = {name!r} must be a text")
    return name


def _is_number(value: object) -> bool:
    """Whether it is one that a float can hold, or nan."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and not (isinstance(value, int) and abs(value) > sys.float_info.max)
