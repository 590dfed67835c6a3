"""Plotly figures as pure functions of runs: curves over time or samples, and one bar a run."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import plotly.graph_objects as go

from polytempo.report.runs import RunRecord
from polytempo.report.style import look
from polytempo.report.summary import TIMES, Summary, finite, human_bytes, labels, summaries

MAX_POINTS = 60
"""Longer curves are drawn as means over this many windows."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_GRID, _INK, _QUIET = "#E6E9EE", "#1F2933", "#52606D"


class Unit(NamedTuple):
    """What a time axis counts in."""

    name: str
    seconds: float


def curves(runs: Sequence[RunRecord], quantity: str, over: str) -> go.Figure | None:
    """`quantity` ("loss" or "accuracy") over "seconds" or "samples": a line a run. None where no run has any.

    Loss is the training loss, accuracy that of the test data.
    """
    kind = "train" if quantity == "loss" else "test"
    unit = time_unit(runs) if over == "seconds" else Unit("", 1.0)
    lines = [windowed(points(run, kind, over, quantity), MAX_POINTS) for run in runs]
    if not any(lines):
        return None
    figure = go.Figure(layout=plain_layout(height=360))
    for number, (line, label) in enumerate(zip(lines, labels(runs), strict=True)):
        style, text = look(number), html.escape(label, quote=False)
        figure.add_scatter(
            x=[x / unit.seconds for x, _ in line],
            y=[y for _, y in line],
            name=text,
            meta=number,
            mode="lines+markers",
            line={"color": style.color, "dash": style.dash.plotly, "width": 2},
            marker={"symbol": style.symbol.plotly, "size": _some(len(line), number), "line": {"width": 0}},
            hovertemplate=_hover(text, quantity, over, unit),
        )
    figure.update_xaxes(
        title_text=time_title(runs) if over == "seconds" else "Samples (all workers)", rangemode="tozero"
    )
    _quantity_axis(figure, quantity, [y for line in lines for _, y in line])
    return figure


def throughput_bars(runs: Sequence[RunRecord]) -> go.Figure:
    """Samples per second, a bar a run."""
    return _bars(runs, lambda line: line.samples_per_s, "Throughput (samples/s)", lambda value: f"{value:,.0f}")


def speed_up_bars(runs: Sequence[RunRecord]) -> go.Figure:
    """Speed-up against the baseline, a bar a run; a line marks 1×."""
    figure = _bars(
        runs, lambda line: line.speed_up, f"Speed-up ({TIMES} baseline)", lambda value: f"{value:.2f}{TIMES}"
    )
    figure.add_vline(x=1, line={"color": _QUIET, "width": 1, "dash": "dot"}, layer="below")
    return figure


def communication_bars(runs: Sequence[RunRecord]) -> go.Figure:
    """The share of time in communication, a bar a run."""
    title = "Time in communication (% of the run)"
    figure = _bars(runs, lambda line: line.communication_share, title, lambda value: f"{value:.1%}")
    return figure.update_xaxes(tickformat="~%")


def bytes_bars(runs: Sequence[RunRecord]) -> go.Figure:
    """Bytes sent per rank, a bar a run; on a logarithmic axis where they differ more than a hundredfold."""
    figure = _bars(runs, lambda line: line.bytes_sent, "Sent per rank (bytes)", human_bytes)
    sizes = [line.bytes_sent for line in summaries(runs) if line.bytes_sent > 0]
    if sizes and max(sizes) > 100 * min(sizes):
        low, high = math.floor(math.log10(min(sizes))) - 1, math.log10(max(sizes))
        high += 0.25 * (high - low)
        figure.update_traces(base=10.0**low, x=[max(0.0, line.bytes_sent - 10.0**low) for line in summaries(runs)])
        figure.update_xaxes(type="log", range=[low, high], dtick=math.ceil((high - low) / 5))
        figure.update_xaxes(title_text="Sent per rank (bytes, logarithmic)")
    return figure.update_xaxes(tickformat="~s", ticksuffix="B")


def points(run: RunRecord, kind: str, over: str, quantity: str) -> list[tuple[float, float]]:
    """The pairs (`over`, `quantity`) of the rows of `kind` in the order of `over`, without those that are not finite.

    Workers of a parameter server do not write their rows in that order.
    """
    pairs = ((finite(row.get(over)), finite(row.get(quantity))) for row in run.rows(kind))
    return sorted(((x, y) for x, y in pairs if x is not None and y is not None), key=lambda pair: pair[0])


def windowed(line: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: the means of equal windows, each at its last x."""
    if len(line) <= most:
        return line
    edges = [len(line) * i // most for i in range(most + 1)]
    windows = [line[start:end] for start, end in pairwise(edges)]
    return [(window[-1][0], math.fsum(y for _, y in window) / len(window)) for window in windows]


def time_unit(runs: Sequence[RunRecord]) -> Unit:
    """The unit in which the longest run is a readable number."""
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


def _quantity_axis(figure: go.Figure, quantity: str, values: list[float]) -> None:
    if quantity == "accuracy":
        figure.update_yaxes(title_text="Test accuracy (%)", tickformat="~%")
        return
    spread_out = min(values) > 0 and max(values) > 20 * min(values)
    figure.update_yaxes(title_text="Training loss (logarithmic)" if spread_out else "Training loss")
    if spread_out:
        figure.update_yaxes(type="log", dtick="D2" if max(values) < 1000 * min(values) else 1, tickformat="~g")


def _hover(label: str, quantity: str, over: str, unit: Unit) -> str:
    value = "accuracy %{y:.2%}" if quantity == "accuracy" else "loss %{y:.4g}"
    place = f"%{{x:.4g}} {unit.name}" if over == "seconds" else "%{x:,.0f} samples"
    return f"{label}<br>{value} after {place}<extra></extra>"


def _some(count: int, number: int) -> list[int]:
    """Marker sizes: about eight points of a line are marked, at other places for other runs."""
    stride = max(1, count // 8)
    return [7 if (i - number * stride // 8) % stride == 0 else 0 for i in range(count)]


def _bars(
    runs: Sequence[RunRecord], value: Callable[[Summary], float | None], title: str, text: Callable[[float], str]
) -> go.Figure:
    """A horizontal bar a run, its name above it: long names fit on a phone."""
    values = [value(line) for line in summaries(runs)]
    names = [folded(label) for label in labels(runs)]
    name_lines = max(name.count("<br>") for name in names) + 1
    row_height = 34 + 16 * name_lines
    figure = go.Figure(layout=plain_layout(height=76 + row_height * len(runs)))
    figure.add_bar(
        x=[0.0 if number is None else number for number in values],
        y=list(range(len(runs))),
        text=["not measured" if number is None else text(number) for number in values],
        orientation="h",
        width=20 / row_height,
        offset=0.5 - 27 / row_height,
        textposition="outside",
        cliponaxis=False,
        marker={"color": [look(number).color for number in range(len(runs))]},
        hovertext=names,
        hovertemplate="%{hovertext}<br>%{text}<extra></extra>",
    )
    for number, name in enumerate(names):
        place = {"x": 0, "xref": "paper", "xanchor": "left", "y": number + 0.5 - 28 / row_height, "yanchor": "bottom"}
        figure.add_annotation(text=name, showarrow=False, align="left", borderpad=0, bgcolor="#FFFFFF", **place)
    figure.update_yaxes(visible=False, range=[len(runs) - 0.5, -0.5])
    figure.update_layout(margin={"l": 20, "r": 20, "t": 4, "b": 52})
    most = max((number for number in values if number is not None), default=0.0)
    return figure.update_xaxes(title_text=title, range=[0, most * 1.25 or 1], nticks=6)


def folded(label: str, width: int = 44) -> str:
    """A label on as many lines as it needs, for plotly: folded after commas and before parentheses."""
    lines, rest = [], label
    while len(rest) > width:
        places = [i + 1 for i in range(width) if rest[i] in ", "] + [i for i in range(1, width + 1) if rest[i] == "("]
        place = max(places, default=width)
        lines.append(rest[:place].strip())
        rest = rest[place:].strip()
    return "<br>".join(html.escape(line, quote=False) for line in [*lines, rest] if line)


def plain_layout(height: int) -> dict[str, Any]:
    """What all figures share: axes, fonts and margins, without title and legend, which belong to the page."""
    axis = {
        "gridcolor": _GRID,
        "linecolor": "#9AA5B1",
        "zeroline": False,
        "automargin": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#9AA5B1",
        "title": {"standoff": 10, "font": {"size": 13, "color": _QUIET}},
    }
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 56, "r": 18, "t": 14, "b": 52},
        "font": {"family": FONT, "size": 12, "color": _INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "#FFFFFF",
        "hoverlabel": {"namelength": -1, "bgcolor": "#FFFFFF", "font": {"family": FONT, "color": _INK}},
        "showlegend": False,
        "xaxis": {**axis, "showline": True},
        "yaxis": axis,
    }
