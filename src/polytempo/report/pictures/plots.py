"""Figures as pure functions of runs: curves over time or samples, and one bar a run."""

from __future__ import annotations

import html
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from polytempo.report.pages.summary import TIMES, Summary, finite, human_bytes, percent, summaries
from polytempo.report.pictures.figure import Figure, Line, axes_of, empty_figure, run_line
from polytempo.report.pictures.marks import draw_marks, marks_of, places
from polytempo.report.pictures.style import PAPER, QUIET, look
from polytempo.report.runs import RunRecord, short_labels

MAX_POINTS = 60
"""Longer curves are drawn as means over this many windows."""


class Unit(NamedTuple):
    """The unit of a time axis."""

    name: str
    seconds: float


def curves(runs: Sequence[RunRecord], quantity: str, over: str) -> Figure | None:
    """`quantity` ("loss" or "accuracy") over "seconds" or "samples": a line a run. None where no run has any.

    Loss is the training loss, accuracy the test accuracy. One run alone has marks of its faults and diagnoses.
    """
    unit = time_unit(runs) if over == "seconds" else Unit("", 1.0)
    lines = lines_of(runs, quantity, over)
    if not any(lines):
        return None
    figure = empty_figure(340, time_title(runs) if over == "seconds" else "Samples (all workers)")
    for number, (line, label) in enumerate(zip(lines, short_labels(runs), strict=True)):
        style, text = look(number), html.escape(label, quote=False)
        marker = {
            "symbol": style.symbol.plotly,
            "color": style.color,
            "size": _some(len(line), number),
            "line": {"width": 0},
        }
        hover = _hover(text if len(runs) > 1 else "", quantity, over, unit)
        figure.data.append({**run_line(number, line, text, hover), "mode": "lines+markers", "marker": marker})
    _crop(figure, lines, quantity)
    mark_one_run(figure, runs, over, unit.seconds)
    return figure


def mark_one_run(figure: Figure, runs: Sequence[RunRecord], axis: str, scale: float = 1.0) -> None:
    """Draw the marks of the only run over `axis`, in units of `scale`. Marks of several runs would be a thicket."""
    if len(runs) != 1:
        return
    marks, rows = marks_of(runs[0].logged), runs[0].rows("train")
    columns = {name: [_or_nan(row.get(name)) for row in rows] for name in {"step", "seconds", axis}}
    at = zip(places(marks, axis, columns), marks, strict=True)
    found = [(x / scale, mark) for x, mark in at if x is not None]
    draw_marks(figure, found, [folded(mark.text, 60) for _, mark in found])


def _or_nan(value: object) -> float:
    number = finite(value)
    return math.nan if number is None else number


def left_out(runs: Sequence[RunRecord], quantity: str, over: str) -> str:
    """A sentence on the runs with curves that leave the figure of `curves`, "" without such runs."""
    lines = lines_of(runs, quantity, over)
    beyond = axes_of(lines, quantity).beyond if any(lines) else []
    if not beyond:
        return ""
    names = short_labels(runs)
    ends = [lines[number][-1][1] for number in beyond]
    shown = [percent(end, 1) if quantity == "accuracy" else f"{end:.3g}" for end in ends]
    listed = ", ".join(f"{names[number]} (ends at {end})" for number, end in zip(beyond, shown, strict=True))
    return f"Leaving this view: {listed}."


def lines_of(runs: Sequence[RunRecord], quantity: str, over: str) -> list[Line]:
    """The points of each run as they are drawn: seconds in the unit of the axis."""
    kind = "train" if quantity == "loss" else "test"
    scale = time_unit(runs).seconds if over == "seconds" else 1.0
    lines = [windowed(points(run, kind, over, quantity), MAX_POINTS) for run in runs]
    return [[(x / scale, y) for x, y in line] for line in lines]


def throughput_bars(runs: Sequence[RunRecord]) -> Figure:
    """Samples per second, a bar a run."""
    return _bars(runs, lambda line: line.samples_per_s, "Throughput (samples/s)", lambda value: f"{value:,.0f}")


def speed_up_bars(runs: Sequence[RunRecord]) -> Figure:
    """Speed-up against the baseline, a bar a run; a line marks 1×."""
    title = f"Speed-up ({TIMES} baseline)"
    figure = _bars(runs, lambda line: line.speed_up, title, lambda value: f"{value:.2f}{TIMES}")
    ends = {"x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper"}
    mark = {"type": "line", "line": {"color": QUIET, "width": 1, "dash": "dot"}, "layer": "below", **ends}
    figure.layout["shapes"] = [mark]
    return figure


def communication_bars(runs: Sequence[RunRecord]) -> Figure:
    """The share of time in communication, a bar a run."""
    title = "Communication (% of the time)"
    figure = _bars(runs, lambda line: line.communication_share, title, lambda value: percent(value, 1))
    figure.xaxis["tickformat"] = "~%"
    return figure


def bytes_bars(runs: Sequence[RunRecord]) -> Figure:
    """Bytes sent per rank, a bar a run; on a logarithmic axis where they differ more than a hundredfold."""
    figure = _bars(runs, lambda line: line.bytes_sent, "Sent per rank (bytes)", human_bytes)
    sizes = [line.bytes_sent for line in summaries(runs) if line.bytes_sent > 0]
    if sizes and max(sizes) > 100 * min(sizes):
        low, high = math.floor(math.log10(min(sizes))) - 1, math.log10(max(sizes))
        high += 0.25 * (high - low)
        longer = [max(0.0, line.bytes_sent - 10.0**low) for line in summaries(runs)]
        figure.data[0].update(base=10.0**low, x=longer)
        figure.xaxis.update(type="log", range=[low, high], dtick=math.ceil((high - low) / 5))
        figure.xaxis["title"]["text"] = "Sent per rank (bytes, logarithmic)"
    figure.xaxis.update(tickformat="~s", ticksuffix="B")
    return figure


def points(run: RunRecord, kind: str, over: str, quantity: str) -> list[tuple[float, float]]:
    """The pairs (`over`, `quantity`) of the rows of `kind` in the order of `over`, without values that are not finite.

    Workers of a parameter server do not write their rows in that order, and each tells its own loss: a point is the
    mean of as many rows as there are workers, so a silent worker does not hold the line up.
    """
    found = ((finite(row.get(over)), finite(row.get(quantity)), row.get("worker")) for row in run.rows(kind))
    ordered = sorted(((x, y, who) for x, y, who in found if x is not None and y is not None), key=lambda each: each[0])
    told = deque[float](maxlen=len({who for _, _, who in ordered}) or 1)
    line = []
    for x, y, _ in ordered:
        told.append(y)
        line.append((x, math.fsum(told) / len(told)))
    return line


def windowed(line: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Means of equal windows, at most `most`, each at its last x."""
    if len(line) <= most:
        return line
    edges = [len(line) * i // most for i in range(most + 1)]
    windows = [line[start:end] for start, end in pairwise(edges)]
    return [(window[-1][0], math.fsum(y for _, y in window) / len(window)) for window in windows]


def time_unit(runs: Sequence[RunRecord]) -> Unit:
    """The unit that makes the longest run a readable number."""
    longest = max((float(run.result["seconds"]) for run in runs), default=0.0)
    for unit in (Unit("h", 3600.0), Unit("min", 60.0), Unit("s", 1.0)):
        if longest >= (0.5 if unit.name == "s" else 3 * unit.seconds):
            return unit
    return Unit("ms", 1e-3)


def time_title(runs: Sequence[RunRecord]) -> str:
    """The time axis in words: it says where its seconds are virtual."""
    unit, worlds = time_unit(runs).name, {run.simulated for run in runs}
    if worlds == {True}:
        return f"Virtual time ({unit})"
    return f"Time ({unit}; virtual where simulated)" if True in worlds else f"Time ({unit})"


def _crop(figure: Figure, lines: Sequence[Line], quantity: str) -> None:
    axes = axes_of(lines, quantity)
    figure.xaxis["range"], figure.yaxis["range"] = list(axes.x), list(axes.y)
    if quantity == "accuracy":
        figure.yaxis["title"]["text"] = "Test accuracy (%)"
        figure.yaxis["tickformat"] = "~%"
        return
    figure.yaxis["title"]["text"] = "Training loss (logarithmic)" if axes.log else "Training loss"
    if axes.log:
        dtick = "D2" if axes.y[1] - axes.y[0] < 3 else 1
        figure.yaxis.update(type="log", dtick=dtick, tickformat="~g")


def _hover(label: str, quantity: str, over: str, unit: Unit) -> str:
    value = "accuracy %{y:.2%}" if quantity == "accuracy" else "loss %{y:.4g}"
    place = f"%{{x:.4g}} {unit.name}" if over == "seconds" else "%{x:,.0f} samples"
    return f"{label}<br>{value} after {place}<extra></extra>" if label else f"{value} after {place}<extra></extra>"


def _some(count: int, number: int) -> list[int]:
    """Marker sizes: about eight points of a line are marked, at other places for other runs."""
    stride = max(1, count // 8)
    return [7 if (i - number * stride // 8) % stride == 0 else 0 for i in range(count)]


def _bars(
    runs: Sequence[RunRecord], value: Callable[[Summary], float | None], title: str, text: Callable[[float], str]
) -> Figure:
    """A horizontal bar a run, its name above it: long names fit on a phone."""
    values = [value(line) for line in summaries(runs)]
    names = [folded(label) for label in short_labels(runs)]
    name_lines = max(name.count("<br>") for name in names) + 1
    row_height = 34 + 16 * name_lines
    figure = empty_figure(76 + row_height * len(runs), title)
    figure.data.append(
        {
            "type": "bar",
            "x": [0.0 if number is None else number for number in values],
            "y": list(range(len(runs))),
            "text": ["not measured" if number is None else text(number) for number in values],
            "orientation": "h",
            "width": 20 / row_height,
            "offset": 0.5 - 27 / row_height,
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": [look(number).color for number in range(len(runs))]},
            "hovertext": [html.escape(line.call, quote=False) for line in summaries(runs)],
            "hovertemplate": "%{hovertext}<br>%{text}<extra></extra>",
        }
    )
    place = {"x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom", "align": "left"}
    figure.layout["annotations"] = [
        {"text": name, "showarrow": False, "borderpad": 0, "bgcolor": PAPER, "y": row + 0.5 - 28 / row_height, **place}
        for row, name in enumerate(names)
    ]
    figure.layout["margin"] = {"l": 20, "r": 20, "t": 4, "b": 52}
    figure.yaxis.update(visible=False, range=[len(runs) - 0.5, -0.5])
    most = max((number for number in values if number is not None), default=0.0)
    figure.xaxis.update(range=[0, most * 1.25 or 1], nticks=6)
    return figure


def folded(label: str, width: int = 44) -> str:
    """A label on as many lines as it needs, for plotly: folded after commas and before parentheses."""
    lines, rest = [], label
    while len(rest) > width:
        places = [i + 1 for i in range(width) if rest[i] in ", "] + [i for i in range(1, width + 1) if rest[i] == "("]
        place = max(places, default=width)
        lines.append(rest[:place].strip())
        rest = rest[place:].strip()
    return "<br>".join(html.escape(line, quote=False) for line in [*lines, rest] if line)
