"""`Figure`: the plain data that plotly.js draws, the layout that all figures share, and the bounds of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from polytempo.report.pictures.style import AXIS, GRID, INK, PAPER, QUIET, look

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


class Figure(NamedTuple):
    """One figure: plotly.js's traces and its layout. Colors are for the light mode."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]

    @property
    def xaxis(self) -> dict[str, Any]:
        """The horizontal axis, which may be changed."""
        axis: dict[str, Any] = self.layout["xaxis"]
        return axis

    @property
    def yaxis(self) -> dict[str, Any]:
        """The vertical axis, which may be changed."""
        axis: dict[str, Any] = self.layout["yaxis"]
        return axis


def empty_figure(height: int, x_title: str, y_title: str = "") -> Figure:
    """A figure without traces. Its title and legend belong to the page."""
    layout: dict[str, Any] = {
        "height": height,
        "margin": {"l": 56, "r": 18, "t": 14, "b": 52},
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": PAPER,
        "hoverlabel": {"namelength": -1, "bgcolor": PAPER, "bordercolor": AXIS, "font": {"family": FONT, "color": INK}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": AXIS, "activecolor": QUIET},
        "showlegend": False,
        "uirevision": "kept",  # a change of mode keeps the reader's zoom
        "xaxis": {**_axis(x_title), "showline": True},
        "yaxis": _axis(y_title),
    }
    return Figure([], layout)


def run_line(number: int, line: Line, name: str, hover: str) -> dict[str, Any]:
    """The trace of a line of run `number`, in the run's look. `name` and `hover` are HTML."""
    style = look(number)
    return {
        "type": "scatter",
        "x": [x for x, _ in line],
        "y": [y for _, y in line],
        "name": name,
        "meta": number,
        "mode": "lines",
        "line": {"color": style.color, "dash": style.dash.plotly, "width": 2},
        "hovertemplate": hover,
    }


def _axis(title: str) -> dict[str, Any]:
    return {
        "gridcolor": GRID,
        "linecolor": AXIS,
        "zeroline": False,
        "automargin": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": AXIS,
        "title": {"text": title, "standoff": 10, "font": {"size": 13, "color": QUIET}},
    }


Line = Sequence[tuple[float, float]]
"""The points (x, y) of a run, in the order of x."""


class AxisRanges(NamedTuple):
    """The ranges of both axes, and which runs leave them."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool
    beyond: list[int]
    """Numbers of the runs with a part outside at the right, or the end below (of a loss: above)."""


def axes_of(lines: Sequence[Line], quantity: str) -> AxisRanges:
    """The axes for the curves of some runs; at least one has a point.

    Accuracy begins where most curves are after an eighth of their points, so that their finish can be told apart; loss
    ends there. A third of the runs, at most, may be outside, and only if that makes the axis twice as fine.
    """
    drawn = [line for line in lines if line]
    values = [y for line in drawn for _, y in line]
    log = quantity == "loss" and min(values) > 0 and max(values) > 20 * min(values)
    sign = 1.0 if quantity == "accuracy" else -1.0
    heights = [[sign * (math.log10(y) if log else y) for _, y in line] for line in drawn]
    starts = [sorted(line)[len(line) // 8] for line in heights]
    if quantity == "loss":
        starts = [min(line) for line in heights]  # the first points of a loss are its shape
    high = max(max(line) for line in heights)
    low = high - _kept([high - start for start in starts])
    margin = 0.06 * (high - low) or 0.01
    y = (max(0.0, low - margin) if quantity == "accuracy" else low - margin, high + margin)
    longest = _kept([line[-1][0] for line in drawn])
    x = (0.0, longest * 1.03 or 1.0)
    beyond = [
        number
        for number, line in enumerate(lines)
        if line and (line[-1][0] > x[1] or sign * (math.log10(line[-1][1]) if log else line[-1][1]) < y[0])
    ]
    return AxisRanges(x, y if quantity == "accuracy" else (-y[1], -y[0]), log, beyond)


def _kept(spans: Sequence[float]) -> float:
    """The longest span, or the longest without a third of them where that is less than half of it."""
    longest, usual = max(spans), sorted(spans)[len(spans) - 1 - len(spans) // 3]
    return usual if 0 < 2 * usual < longest else longest
