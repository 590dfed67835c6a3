"""Results as tables for people: ours | peers | limit | ratios, in units that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polytempo.report.pages.summary import TIMES

Table = tuple[Sequence[str], list[Sequence[str]]]
"""Columns, and rows of cells."""

NAMES = {
    "one_thread": "one process",
    "threads": "one process, all threads",
    "apart": "processes apart (limit)",
    "ddp_gloo": "DDP over gloo",
    "ddp_polytempo": "DDP over polytempo",
    "shared_memory": "shared_memory()",
    "hogwild": "hogwild()",
    "ours": "ours",
    "gloo": "gloo",
    "mpi": "Open MPI",
    "limit": "limit",
}
"""Names of the contenders in tables and pictures."""


def table(result: Mapping[str, Any]) -> Table:
    """A result's table."""
    tables = {"collectives": _collectives, "training": _training, "memory": _memory, "compression": _compression}
    return tables[result["benchmark"]](result["rows"])


def missing(result: Mapping[str, Any]) -> list[str]:
    """A line for each contender that could not be measured: its name, why, and the remedy."""
    return [f"{NAMES[name]} is not measured: {reason}" for name, reason in result["missing"].items()]


def markdown(found: Table) -> str:
    """A table as Markdown."""
    columns, rows = found
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def duration(microseconds: float) -> str:
    """`0.23 µs`, `18.1 µs`, `1.65 ms`, `2.31 s`."""
    for unit, scale in (("µs", 1.0), ("ms", 1e3), ("s", 1e6)):
        if microseconds < 999.5 * scale or unit == "s":
            return f"{_three_digits(microseconds / scale)} {unit}"
    raise AssertionError("seconds take everything")


def binary(num_bytes: float) -> str:
    """`4 KiB`, `1.5 GiB`: of memory, as memory is bought."""
    for unit, scale in (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if num_bytes < 1000 * scale or unit == "GiB":
            return (
                f"{_three_digits(num_bytes / scale)} {unit}"
                if num_bytes % scale
                else f"{num_bytes // scale:.0f} {unit}"
            )
    raise AssertionError("GiB take everything")


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _collectives(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("operation", "tensors", "ranks", "size", "ours", "gloo", "Open MPI", "limit")
    ratios = {"gloo/ours": "gloo / ours", "mpi/ours": "MPI / ours", "ours/limit": "ours / limit"}
    cells = [
        (
            *(row["operation"], row["tensors"], str(row["ranks"]), binary(row["bytes"]) if row["bytes"] else "-"),
            *(duration(row[key]["median_us"]) if row[key] else "-" for key in ("ours", "gloo", "mpi", "limit")),
            *(_ratio(row["ratios"][key]) for key in ratios),
        )
        for row in rows
    ]
    return (*columns, *ratios.values()), list(cells)


def _training(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("model", "configuration", "samples/s", "of one process", "of DDP over gloo", "of the limit")
    cells = [
        (
            *(row["model"], NAMES[row["configuration"]], f"{row['samples_per_s']['median']:,.0f}"),
            *(_ratio(row["ratios"][base]) for base in ("one_thread", "ddp_gloo", "apart")),
        )
        for row in rows
    ]
    return columns, list(cells)


def _memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("configuration", "workers", "parameters", "peak, all workers", "before the model", "of DDP over gloo")
    cells = [
        (
            *(NAMES[row["configuration"]], str(row["workers"]), f"{row['parameters']:,}"),
            *(binary(row["peak_bytes"]), binary(row["before_bytes"]), f"{row['ratio']:.2f}{TIMES}"),
        )
        for row in rows
    ]
    return columns, list(cells)


def _compression(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        *("codec", "way", "smaller", "encode", "decode", "computing a step", "sending", "step", "uncompressed"),
        "wins below",
    )
    cells = [
        (
            *(row["codec"], row["way"], f"{_three_digits(row['ratio'])}{TIMES}"),
            *(
                "-" if row[key] is None else duration(row[key] * 1e6)
                for key in ("encode_s", "decode_s", "computing_s", "communication_s", "step_s", "uncompressed_s")
            ),
            _link_speed(row["wins_below_bytes_per_s"]),
        )
        for row in rows
    ]
    return columns, list(cells)


def _link_speed(bytes_per_s: float | str | None) -> str:
    """`940 Mbit/s`, `25.0 Gbit/s`; `any speed`, `never`."""
    if bytes_per_s is None or isinstance(bytes_per_s, str):
        return "never" if bytes_per_s is None else f"{bytes_per_s} speed"
    bits = 8 * bytes_per_s
    return f"{_three_digits(bits / 1e9)} Gbit/s" if bits >= 999.5e6 else f"{_three_digits(bits / 1e6)} Mbit/s"


def _ratio(found: Mapping[str, float] | None) -> str:
    """The ratio, and in parentheses the quartiles over rounds."""
    if found is None:
        return "-"
    median, low, high = (_three_digits(found[key]) for key in ("median", "low", "high"))
    return f"{median}{TIMES} ({low} to {high})"
