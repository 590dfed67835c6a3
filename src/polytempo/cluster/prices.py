"""What a file of a cluster says besides the cluster: what a host costs, and how far its measurements lie apart.

[price]
host_hour = 1.2        in any currency

[spread]               written by `polytempo calibrate`
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

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
    if not _is_number(price) or not 0 <= price < float("inf"):
        raise ValueError(f"{path}: price.host_hour = {price!r} must be a number from 0")
    return float(price)


def read_spread(path: Path) -> dict[str, float]:
    """(90th percentile - 10th percentile) / median of what was measured, by name; empty where nothing was."""
    found = {name: value for name, value in _table(path, "spread").items() if _is_number(value)}
    return {name: float(value) for name, value in found.items() if 0 <= value < float("inf")}


def _table(path: Path, key: str) -> dict[str, Any]:
    table = tomllib.loads(path.read_text(encoding="utf-8")).get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{path}: {key} must be a table, headed by [{key}]")
    return table


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
