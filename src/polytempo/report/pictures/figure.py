"""`Figure`: what plotly.js draws, as plain data, and the layout that all figures share."""

from __future__ import annotations

from typing import Any, NamedTuple

from polytempo.report.pictures.axes import Line
from polytempo.report.pictures.style import AXIS, GRID, INK, PAPER, QUIET, look

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


class Figure(NamedTuple):
    """One figure: plotly.js's traces and its layout. Colors are those of the light mode."""

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
        "uirevision": "kept",  # a change of mode keeps what the reader has zoomed to
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
