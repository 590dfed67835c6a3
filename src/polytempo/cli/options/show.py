"""Output of commands: tables for people, JSON for programs. Only results go to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from math import isfinite

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from polytempo.report.pages.diagnoses import diagnoses
from polytempo.spec.text.plain_text import plain_text

_RESULT_ROWS = (
    ("strategy", "strategy"),
    ("world", "world"),
    ("workers", "workers"),
    ("steps", "steps"),
    ("epochs", "epochs"),
    ("seconds", "seconds"),
    ("samples/s", "samples_per_s"),
    ("loss", "loss"),
    ("accuracy", "accuracy"),
    ("communication", "communication_share"),
    ("sent", "bytes_sent_per_rank"),
    ("report", "report"),
    ("checkpoint", "checkpoint"),
)
_COMPARED_COLUMNS = ("strategy", "seconds", "samples/s", "loss", "accuracy", "sent")
_SHARES = ("accuracy", "communication_share")


@contextmanager
def notes_on_stderr() -> Generator[None]:
    """Send all output meanwhile, of jobs too, to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def show_json(value: object) -> None:
    """One JSON value on standard output. JSON has no NaN, so the loss of a run that diverged is null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def say_unreached(results: Sequence[Mapping[str, object]]) -> bool:
    """Name on standard error the runs that ended without reaching `--until`; True if there is one."""
    unreached = [result["strategy"] for result in results if result.get("reached") is False]
    for strategy in unreached:
        said = plain_text(f"{strategy}: ended before --until was reached; allow more --epochs or --steps")
        print(said, file=sys.stderr)
    return bool(unreached)


def say_diverged(results: Sequence[Mapping[str, object]]) -> bool:
    """Say on standard error which runs ended at a value that was not finite; whether there is one."""
    diverged = [result for result in results if result.get("diverged")]
    for result in diverged:
        print(plain_text(f"error: {result['strategy']}: {result['diverged']}"), file=sys.stderr)
    return bool(diverged)


def show_result(result: Mapping[str, object]) -> None:
    """One run's result: a line for each figure."""
    rows = [(label, figure(key, result[key])) for label, key in _RESULT_ROWS if result.get(key) is not None]
    measured = result.get("metrics")
    if isinstance(measured, Mapping):
        after = next((i for i, (label, _) in enumerate(rows) if label == "communication"), len(rows))
        rows[after:after] = [(str(name), figure("metric", value)) for name, value in measured.items()]
    show_table(("", ""), rows, header=False)
    for said in diagnoses(result):
        print(plain_text(said))


def show_results(results: Sequence[Mapping[str, object]]) -> None:
    """Several runs' results: a line for each run."""
    keys = dict(_RESULT_ROWS)
    rows = [tuple(figure(keys[label], result.get(keys[label])) for label in _COMPARED_COLUMNS) for result in results]
    show_table(_COMPARED_COLUMNS, rows)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    """A rich table on a terminal; elsewhere plain columns that grep and cut can read."""
    rows = [tuple(map(plain_text, row)) for row in rows]
    if not sys.stdout.isatty():
        lines = [tuple(columns), *map(tuple, rows)] if header else list(map(tuple, rows))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(show_header=header, box=SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", style="bold" if index == 0 else "")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)


def figure(key: str, value: object) -> str:
    """A result's value as a person reads it: `97.2 %`, `1.4 MB`, `12,345`."""
    if value is None:
        return "-"
    if key in _SHARES and isinstance(value, int | float):
        return f"{100 * value:.1f} %"
    if key == "bytes_sent_per_rank" and isinstance(value, int | float):
        return size(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def size(num_bytes: float) -> str:
    """Bytes in the unit that fits: `1.4 MB`."""
    amount = num_bytes
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
