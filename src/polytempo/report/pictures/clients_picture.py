"""A picture of data that are dealt to clients: the classes, the size and the mixture of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polytempo.core.system.url_path import Place
from polytempo.report.pictures.canvas import Figure, FigureCanvasAgg, MaxNLocator, write_png
from polytempo.report.pictures.style import AXIS, COLORS, GRID, INK, QUIET

_DOTS_PER_INCH = 110


def draw_clients(
    path: Place, counts: NDArray[np.int64], entropy: Sequence[float], distance: Sequence[float], title: str
) -> None:
    """Write a PNG with a row for each client: the part of each class, samples, bits of entropy, distance from all.

    `counts` has the shape (clients, classes).
    """
    sizes, (clients, classes) = counts.sum(1), counts.shape
    height = min(12.0, 2.6 + 0.09 * max(clients, 25))
    figure = Figure(figsize=(10, height), dpi=_DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    table, *bars = figure.subplots(1, 4, sharey=True, width_ratios=(3, 1, 1, 1))
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.55 / height, top=1 - 0.75 / height, wspace=0.12)
    image = table.imshow(counts / sizes[:, None], aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    table.set_title("part of each class", fontsize=9, color=INK)
    table.set_xlabel("class", fontsize=9, color=QUIET)
    table.set_ylabel("client", fontsize=9, color=QUIET)
    scale = figure.colorbar(image, ax=table, fraction=0.04, pad=0.02)
    scale.outline.set_visible(False)
    scale.ax.tick_params(labelsize=8, colors=QUIET, length=0)
    rows = [("samples", sizes, None), ("entropy, bits", entropy, np.log2(max(2, classes))), ("distance", distance, 1.0)]
    for axes, (name, values, most) in zip(bars, rows, strict=True):
        axes.barh(range(clients), values, height=0.8, color=COLORS[0])
        axes.axvline(float(np.mean(values)), color=QUIET, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, most)
        axes.set_title(name, fontsize=9, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
    for axes in (table, *bars):
        axes.tick_params(labelsize=8, colors=QUIET, length=0)
        axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(AXIS)
    table.xaxis.set_major_locator(MaxNLocator(min(classes, 12), integer=True))
    figure.suptitle(title, fontsize=10, color=INK, x=0.07, ha="left", y=1 - 0.12 / height, va="top")
    write_png(figure, path)
