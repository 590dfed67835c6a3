"""`RowTable`: the rows of a run as a table: a list of dicts that a notebook shows, and pandas takes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from polytempo.core.system.url_path import place
from polytempo.report.status.rows import read_metrics
from polytempo.spec.text.notebook_table import rows_html

_SHOWN = 30


class RowTable(list[dict[str, Any]]):
    """Rows "train" and "test" of a run, in order; see `history`."""

    def of(self, kind: str) -> RowTable:
        """The rows of one kind, "train" or "test"."""
        return RowTable(row for row in self if row.get("kind") == kind)

    def column(self, name: str) -> list[Any]:
        """An entry of all rows that have it. ValueError where none has."""
        found = [row[name] for row in self if name in row]
        if not found:
            raise ValueError(f"no row has {name!r}; there are: {', '.join(self.names)}")
        return found

    @property
    def names(self) -> list[str]:
        """The entries of all rows, in the order of their first row."""
        return list(dict.fromkeys(name for row in self for name in row))

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a column for each entry. ValueError where pandas is not installed."""
        try:
            pandas: Any = import_module("pandas")  # optional
        except ImportError:
            raise ValueError("to_pandas needs the package pandas; run: pip install pandas") from None
        return pandas.DataFrame(list(self), columns=self.names)

    def _repr_html_(self) -> str:
        """The last rows as a notebook shows them; of nested entries none."""
        names = [name for name in self.names if not any(isinstance(row.get(name), dict | list) for row in self)]
        shown = [{name: _text(row.get(name)) for name in names} for row in self[-_SHOWN:]]
        left = f", the last {_SHOWN}" * (len(self) > _SHOWN)
        return rows_html(f"{len(self)} rows{left}", shown)


def history(run: object) -> RowTable:
    """The rows of the run in a folder: each a dict with `kind`, `step`, `epoch`, `samples`, `seconds`, `loss`, ….

        rows = pt.training.history("runs/digits-sync_sgd")
        best = max(rows.of("test").column("accuracy"))

    ValueError where the folder holds no run.
    """
    if not (rows := read_metrics(place(str(run)))):
        raise ValueError(f"{run} has no rows of a run; name the folder of a run (out=…, --out)")
    return RowTable(rows)


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
