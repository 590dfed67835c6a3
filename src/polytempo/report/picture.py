"""`compare.png`: what a comparison showed, in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from polytempo.core import files
from polytempo.report.plots import MAX_POINTS, points, time_title, time_unit, windowed
from polytempo.report.runs import RunRecord
from polytempo.report.style import look
from polytempo.report.summary import labels

_DOTS_PER_INCH = 140
_SIZE_INCHES = (1400 / _DOTS_PER_INCH, 560 / _DOTS_PER_INCH)
_INK, _QUIET = "#1F2933", "#52606D"


def write_picture(path: Path, runs: Sequence[RunRecord]) -> None:
    """Write a PNG of 1400 × 560 pixels: test accuracy (or, without any, training loss) over time and over samples."""
    if not runs:
        raise ValueError("a picture needs at least one run; pass the records of the runs that finished")
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    quantity = "accuracy" if any(points(run, "test", "samples", "accuracy") for run in runs) else "loss"
    bottom = 0.14 + _legend(figure, runs)
    for place, over in enumerate(("seconds", "samples")):
        axes = figure.add_axes((0.068 + 0.485 * place, bottom, 0.42, 0.9 - bottom))
        _draw(axes, runs, quantity, over)
    with files.aside(path) as stream:
        figure.savefig(stream, format="png")


def _legend(figure: Figure, runs: Sequence[RunRecord]) -> float:
    """One legend below both panels, in as many columns as fit. Returns its height as a part of the figure's."""
    names = [label.replace("$", r"\$") for label in labels(runs)]
    handles = [Line2D([], [], **_line_style(number)) for number in range(len(runs))]
    for columns in (4, 3, 2, 1):
        legend = figure.legend(
            handles,
            names,
            loc="lower center",
            ncols=columns,
            frameon=False,
            fontsize=8.5 if len(runs) <= 8 else 7,
            labelcolor=_INK,
            columnspacing=2.2,
            handlelength=2.8,
        )
        extent = legend.get_window_extent().transformed(figure.transFigure.inverted())
        if extent.width <= 1 or columns == 1:
            return min(float(extent.height), 0.45)
        legend.remove()
    raise AssertionError("one column is always taken")


def _line_style(number: int) -> dict[str, Any]:
    style = look(number)
    return {
        "color": style.color,
        "linestyle": style.dash.matplotlib,
        "marker": style.symbol.matplotlib,
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def _draw(axes: Axes, runs: Sequence[RunRecord], quantity: str, over: str) -> None:
    scale = time_unit(runs).seconds if over == "seconds" else 1.0
    values: list[float] = []
    for number, run in enumerate(runs):
        line = windowed(points(run, "test" if quantity == "accuracy" else "train", over, quantity), MAX_POINTS)
        x, y = [x / scale for x, _ in line], [y for _, y in line]
        axes.plot(x, y, markevery=max(1, len(line) // 8), **_line_style(number))
        values += y
    axes.set_xlim(left=0)
    _name_axes(axes, runs, quantity, over)
    _limit(axes, quantity, sorted(values))


def _name_axes(axes: Axes, runs: Sequence[RunRecord], quantity: str, over: str) -> None:
    what = "Test accuracy" if quantity == "accuracy" else "Training loss"
    axes.set_title(f"{what} against {over.replace('seconds', 'time')}", fontsize=10.5, color=_INK, loc="left", pad=8)
    axes.set_xlabel(time_title(runs) if over == "seconds" else "Samples (all workers)", fontsize=9, color=_QUIET)
    if over == "seconds":
        axes.set_ylabel(f"{what} (%)" if quantity == "accuracy" else what, fontsize=9, color=_QUIET)
    axes.tick_params(labelsize=8.5, color="#9AA5B1", labelcolor=_INK)
    axes.grid(color="#E6E9EE", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#9AA5B1")
    if over == "samples":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.0f}"))


def _limit(axes: Axes, quantity: str, values: list[float]) -> None:
    """Accuracy begins where most of the curves are, so that the finish can be told apart."""
    if quantity == "accuracy" and values:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:g}"))
        low, high = values[len(values) // 8], values[-1]
        margin = 0.06 * (high - low) or 0.01
        axes.set_ylim(max(0.0, low - margin), high + margin)
    elif values and values[0] > 0 and values[-1] > 20 * values[0]:
        axes.set_yscale("log")
    elif not values:
        axes.set_ylim(0, 1)
