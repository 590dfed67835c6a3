"""`polytempo runs`: the runs below a folder, a line for each."""

from __future__ import annotations

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
        show_table(tuple(_COLUMNS), [tuple(figure(key, row.get(key)) for key in _COLUMNS.values()) for row in rows])


def _sorted(rows: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Largest first, or by the alphabet; runs without the field last."""
    fields = sorted({name for row in rows for name in row})
    if rows and field not in fields:
        raise ValueError(f"--sort {field}: no run has it; there are {', '.join(fields)}")
    there = [row for row in rows if row.get(field) is not None]
    words = any(isinstance(row[field], str) for row in there)
    there.sort(key=lambda row: str(row[field]) if words else row[field], reverse=not words)
    return there + [row for row in rows if row.get(field) is None]
