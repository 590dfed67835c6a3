"""The page's section about the gradient noise scale: how large a batch could be, as a run went on."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polytempo.report.pages.summary import finite
from polytempo.report.pictures.figure import Figure, Line, empty_figure, run_line
from polytempo.report.pictures.style import look
from polytempo.report.runs import RunRecord, short_labels


def noise_of(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """tr Σ / |G|² in samples, from the last row of each worker that has measured; None where noise hides |G|².

    The two are added up separately: a mean of quotients would be biased.
    """
    told = [row for row in rows if finite(row.get("noise_trace")) is not None]
    square = sum(row["gradient_square"] for row in told)
    trace = sum(row["noise_trace"] for row in told)
    return trace / square if square > 0 and trace > 0 else None


def noise_line(run: RunRecord) -> Line:
    """The noise scale over the samples of all workers."""
    last: dict[Any, Mapping[str, Any]] = {}
    line: list[tuple[float, float]] = []
    for row in sorted(run.rows("train"), key=lambda row: float(row["samples"])):
        if finite(row.get("noise_trace")) is None:
            continue
        last[row.get("worker")] = row
        scale = noise_of(last.values())
        if scale is not None:
            line.append((float(row["samples"]), scale))
    return line


def last_noise(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The noise scale at the end of a whole run's rows."""
    return noise_of({row.get("worker"): row for row in rows if "noise_trace" in row}.values())


def noise_curves(runs: Sequence[RunRecord]) -> Figure | None:
    """A line for each run that has measured, and a dotted one for the samples of its steps. None where none has."""
    lines = {number: line for number, run in enumerate(runs) if (line := noise_line(run))}
    if not lines:
        return None
    figure = empty_figure(340, "Samples (all workers)", "Noise scale (samples, logarithmic)")
    figure.yaxis.update(type="log", dtick=1, tickformat="~g")
    names = short_labels(runs)
    for number, line in lines.items():
        text = html.escape(names[number], quote=False)
        hover = "noise scale %{y:.3g} samples after %{x:,.0f} samples<extra></extra>"
        figure.data.append(run_line(number, line, text, f"{text}<br>{hover}"))
        result = runs[number].result
        if not result.get("server") and result.get("steps"):
            batch = result["samples"] / result["steps"]
            ends = [(line[0][0], batch), (line[-1][0], batch)]
            hover = f"{text}<br>{batch:,.0f} samples a step<extra></extra>"
            dotted = {"color": look(number).color, "dash": "dot", "width": 1}
            figure.data.append({**run_line(number, ends, f"{text}: samples of a step", hover), "line": dotted})
    return figure
