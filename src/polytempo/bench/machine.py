"""The machine of a figure, and the written form of a benchmark's result."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from polytempo.native.library import instruction_set

SCHEMA = 1
"""Changes when a reader of the JSON would have to."""


def machine() -> dict[str, Any]:
    """Facts that figures depend on. Sizes in bytes."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_bytes": memory_bytes("MemTotal"),
        "kernel": platform.release(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "native": instruction_set(),
    }


def written(
    benchmark: str, settings: dict[str, Any], missing: dict[str, str], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The one object that `--json` prints: schema, benchmark, machine, command, settings, missing, rows.

    `missing` says of every contender that is not in the rows why it is not.
    """
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine(),
        "settings": settings,
        "missing": missing,
        "rows": rows,
    }


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes(key: str) -> int | None:
    """A line of /proc/meminfo; None where there is no such thing."""
    line = _field("/proc/meminfo", key)
    return int(line.split()[0]) * 1024 if line else None


def _field(path: str, key: str) -> str | None:
    if not Path(path).is_file():
        return None
    lines = (line.partition(":") for line in Path(path).read_text(encoding="utf-8").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)
