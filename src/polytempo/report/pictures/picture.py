"""`compare.png`: a comparison in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polytempo.core.system.url_path import Place
from polytempo.report.pictures.canvas import Axes, Figure, FigureCanvasAgg, FuncFormatter, Line2D, plain, write_png
from polytempo.report.pictures.figure import axes_of
from polytempo.report.pictures.plots import left_out, lines_of, points, time_title
from polytempo.report.pictures.style import AXIS, GRID, INK, QUIET, look
from polytempo.report.runs import RunRecord, short_labels

_DOTS_PER_INCH = 140
_SIZE_INCHES = (1400 / _DOTS_PER_INCH, 560 / _DOTS_PER_INCH)


def write_picture(path: Place, runs: Sequence[RunRecord]) -> None:
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
    write_png(figure, path)


def _legend(figure: Figure, runs: Sequence[RunRecord]) -> float:
    """One legend below both panels, in as many columns as fit. Returns its height as a part of the figure's."""
    names = [plain(label) for label in short_labels(runs)]
    handles = [Line2D([], [], **_line_style(number)) for number in range(len(runs))]
    for columns in (4, 3, 2, 1):
        legend = figure.legend(
            handles,
            names,
            loc="lower center",
            ncols=columns,
            frameon=False,
            fontsize=8.5 if len(runs) <= 8 else 7,
            labelcolor=INK,
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
    lines = lines_of(runs, quantity, over)
    for number, line in enumerate(lines):
        x, y = [x for x, _ in line], [y for _, y in line]
        axes.plot(x, y, markevery=max(1, len(line) // 8), **_line_style(number))
    _name_axes(axes, runs, quantity, over)
    if not any(lines):
        axes.set_ylim(0, 1)
        return
    if note := left_out(runs, quantity, over):
        place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
        axes.text(1, 0.02, note.replace("$", r"\$"), fontsize=7.5, color=QUIET, wrap=True, **place)
    limits = axes_of(lines, quantity)
    axes.set_xlim(*limits.x)
    if limits.log:
        axes.set_yscale("log")
    axes.set_ylim(*(10**end if limits.log else end for end in limits.y))
    if quantity == "accuracy":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:g}"))


def _name_axes(axes: Axes, runs: Sequence[RunRecord], quantity: str, over: str) -> None:
    what = "Test accuracy" if quantity == "accuracy" else "Training loss"
    axes.set_title(f"{what} against {over.replace('seconds', 'time')}", fontsize=10.5, color=INK, loc="left", pad=8)
    axes.set_xlabel(time_title(runs) if over == "seconds" else "Samples (all workers)", fontsize=9, color=QUIET)
    if over == "seconds":
        axes.set_ylabel(f"{what} (%)" if quantity == "accuracy" else what, fontsize=9, color=QUIET)
    axes.tick_params(labelsize=8.5, color=AXIS, labelcolor=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(AXIS)
    if over == "samples":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.0f}"))
