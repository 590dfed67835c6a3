"""What a file of a cluster says besides the cluster: what a host costs, how far its measurements lie apart, how many
workers measured.

[price]
host_hour = 1.2        in any currency

[spread]               written by `polytempo calibrate`
[[measured.hosts]]     likewise
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from polytempo.cluster.measured import read_tables

KERNELS_AGAIN, MESSAGES_AGAIN = "kernels again", "messages again"
"""In the table of spread: by how much two measurements of the same hosts differ, |ln(median of later / earlier)|."""
JOB = "job"
"""In the table of spread: by how much a job's steps with an exchange differ from their simulation, |ln(simulated /
measured)|."""


def read_price(path: Path) -> float | None:
    """The price of a host for an hour; None where the file has none. ValueError for one that is no price."""
    price = _table(path, "price").get("host_hour")
    if price is None:
        return None
    if not _is_number(price) or not price > 0:
        raise ValueError(f"{path}: price.host_hour = {price!r} must be a number above 0")
    return float(price)


def read_spread(path: Path) -> dict[str, float]:
    """(90th percentile - 10th percentile) / median of what was measured, by name; empty where nothing was.

    ValueError for what is no spread.
    """
    found = _table(path, "spread")
    for name, value in found.items():
        if not _is_number(value):
            raise ValueError(f"{path}: spread.{name} = {value!r} must be a number from 0")
    return {name: float(value) for name, value in found.items()}


def read_measured(path: Path) -> tuple[int, int] | None:
    """How many hosts, and how many workers on all of them, took part; None where the file lists no hosts."""
    hosts = _table(path, "measured").get("hosts")
    if not isinstance(hosts, list) or not hosts:
        return None
    workers: list[Any] = [host.get("workers") if isinstance(host, dict) else None for host in hosts]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in workers):
        raise ValueError(f"{path}: each of [[measured.hosts]] needs workers, a whole number above 0, got {workers}")
    return len(hosts), sum(workers)


def _table(path: Path, key: str) -> dict[str, Any]:
    table = read_tables(path).get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{path}: {key} must be a table, headed by [{key}]")
    return table


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= sys.float_info.max  # type: ignore[operator]  # a number
