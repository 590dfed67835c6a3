"""`polytempo runs`: the runs below a folder, a line for each."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from polytempo.cli.look.look_options import RunsOptions
from polytempo.cli.options.show import figure, show_json, show_table
from polytempo.core.system.url_path import place
from polytempo.ui.run_list import RunList

_COLUMNS = {
    "run": "id",
    "job": "job",
    "strategy": "strategy",
    "workers": "workers",
    "state": "state",
    "steps": "step",
    "loss": "loss",
    "accuracy": "accuracy",
    "seconds": "seconds",
    "tags": "tags",
}


def runs(asked: RunsOptions) -> None:
    """Show the runs, as a table or as JSON."""
    rows = RunList(place(asked.runs)).look()
    if asked.sort is not None:
        rows = _sorted(rows, asked.sort)
    if asked.json:
        show_json(rows)
    elif not rows:
        print(f"no runs below {asked.runs}; train with --out {asked.runs}/NAME")
    else:
        rows = [row | {"tags": " ".join(row.get("tags", ()))} for row in rows]
        show_table(tuple(_COLUMNS), [tuple(figure(key, row.get(key)) for key in _COLUMNS.values()) for row in rows])


def _sorted(rows: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Largest first, or by the alphabet; runs without the field or setting last."""
    told = [{**row.get("settings", {}), **row} for row in rows]
    fields = sorted({name for each in told for name in each} - {"settings"})
    if rows and field not in fields:
        raise ValueError(f"--sort {field}: no run has it; there are {', '.join(fields)}")
    values = {row["id"]: _number(each.get(field)) for row, each in zip(rows, told, strict=True)}
    there = [row for row in rows if values[row["id"]] is not None]
    words = not all(isinstance(values[row["id"]], int | float) for row in there)
    there.sort(key=lambda row: str(values[row["id"]]) if words else values[row["id"]], reverse=not words)
    return there + [row for row in rows if values[row["id"]] is None]


def _number(value: Any) -> Any:
    """A setting's text as a number, where it is one. None for NaN, which has no place in an order."""
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    return None if isinstance(value, float) and math.isnan(value) else value
