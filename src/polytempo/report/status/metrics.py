"""`MetricsWriter`: `metrics.jsonl`, one row for every report of a run's progress."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from polytempo.core.system.files import METRICS, remove_tails
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.report.status.line_file import LineFile
from polytempo.report.status.rows import read_rows


class MetricsWriter:
    """Writes `metrics.jsonl` in `folder`, one flushed line a row, so that a crash loses at most the row being written.

    A new run starts an empty file. A run resumed at step `resumed_at` keeps the rows up to that step and drops rows
    beyond it, which it will write again; of rows about tests also rows of `scored_again` samples and more. Both remove
    the tails of the run before. A run goes on without rows that cannot be written (see `LineFile`).

        with MetricsWriter(folder) as metrics:
            metrics.write({"kind": "train", "step": 1, "loss": 2.3})
    """

    def __init__(self, folder: Place, *, resumed_at: int | None = None, scored_again: float = math.inf) -> None:
        kept = [] if resumed_at is None else read_rows(folder)
        kept = [row for row in kept if row.get("kind") != "test" or row["samples"] < scored_again]
        lines = [row_line(row) for row in kept if resumed_at is not None and row["step"] <= resumed_at]
        near = isinstance(folder, UrlPath) and folder.url.startswith("polytempo:")  # in the launcher's, who shows rows
        self._before = b""
        remove_tails(folder)
        self._lines = LineFile(folder / METRICS, b"".join(lines), every_s=1.0 if near else 10.0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. Numbers that are not finite become null: JSON has no others."""
        before, self._before = self._before, b""
        self._lines.write(before + row_line(row))

    def write_with_next(self, row: Mapping[str, Any]) -> None:
        """Append one row when the next one comes: without another one the run has not begun."""
        self._before += row_line(row)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._lines.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def row_line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON; values that are not finite are null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(plain, allow_nan=False).encode() + b"\n"
