"""Pictures of a layer, run beside run: its filters, its activations for samples, and the likeness of layers by CKA."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polytempo.core.system.url_path import Place
from polytempo.report.pictures.canvas import (
    Axes,
    ConstrainedLayoutEngine,
    Figure,
    FigureCanvasAgg,
    Normalize,
    plain,
    write_png,
)
from polytempo.report.pictures.style import AXIS, GRID, INK, QUIET

Array = NDArray[np.float64]
_DOTS_PER_INCH = 130
_MOST_TILES, _MOST_OUTPUTS, _MOST_INPUTS = 64, 16, 16
_MOST_ROWS, _MOST_COLUMNS = 64, 512
_MOST_PICTURES, _MOST_MAPS = 6, 8
_MOST_NUMBERS = 12
"""Layers of a matrix with its numbers written into it."""


class RunPart(NamedTuple):
    """A run's panel: its name, a second line, and its array."""

    name: str
    about: str
    values: Array


def draw_filters(path: Place, layer: str, runs: Sequence[RunPart], picture: tuple[int, ...] | None = None) -> str:
    """Write a PNG of weights, (outputs, inputs, …), each run on a scale of its own. Returns a description.

    Kernels of two dims are tiles: one for each output where there is one input, colors where there are three, else
    outputs × inputs. Other weights are rows; rows of `picture`'s size (height, width) are tiles, too.
    """
    shown, said = zip(*(_weights(each.values, picture) for each in runs), strict=True)
    _draw(
        path, f"Weights of {layer}: {said[0]}", [each._replace(values=a) for each, a in zip(runs, shown, strict=True)]
    )
    return str(said[0])


def draw_activations(
    path: Place, layer: str, runs: Sequence[RunPart], inputs: Array | None = None, by: str = "samples"
) -> str:
    """Write a PNG of activations for the same samples, (samples, channels, height, width) or (samples, units, …).

    `inputs`: (samples, height, width) in gray, beside them. Returns a description.
    """
    shape = runs[0].values.shape
    if len(shape) == 4:
        number, maps = min(len(runs[0].values), _MOST_PICTURES), min(shape[1], _MOST_MAPS)
        said = f"{number} samples, the first {maps} of {shape[1]} channels"
        shown = [each._replace(values=_mosaic(each.values[:number, :maps])) for each in runs]
        beside = None if inputs is None else _mosaic(inputs[:number, None])
    else:
        flat = [each.values.reshape(len(each.values), -1)[:_MOST_ROWS, :_MOST_COLUMNS] for each in runs]
        units = int(np.prod(shape[1:]))
        said = f"{len(flat[0])} {by} (rows), {_some(flat[0].shape[1], units)} units (columns)"
        shown = [each._replace(values=a) for each, a in zip(runs, flat, strict=True)]
        beside = None
    _draw(path, f"Activations of {layer}: {said}", shown, beside)
    return said


def draw_similarity(path: Place, layers: Sequence[str], first: str, others: Sequence[RunPart]) -> None:
    """Write a PNG of CKA matrices: the layers of run `first` (rows) beside the layers of each other run (columns)."""
    side = min(6.0, max(3.0, 0.55 * len(layers) + 1.2))
    figure = _blank((side * len(others) + 1.2, side + 0.9))
    panels: Any = figure.subplots(1, len(others), squeeze=False)
    for axes, run in zip(panels[0], others, strict=True):
        image = axes.imshow(run.values, cmap="viridis", norm=Normalize(0, 1))
        axes.set_xticks(range(len(layers)), layers, rotation=90 if len(layers) > 6 else 0, fontsize=8)
        axes.set_yticks(range(len(layers)), layers, fontsize=8)
        axes.set_xlabel(f"layers of {plain(run.name)}", fontsize=9, color=QUIET)
        axes.set_title(plain(run.about), fontsize=9, color=INK, loc="left")
        axes.tick_params(length=0, labelcolor=INK)
        if len(layers) <= _MOST_NUMBERS:
            for (row, column), value in np.ndenumerate(run.values):
                if np.isnan(value):
                    continue
                ink = "white" if value < 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
    panels[0][0].set_ylabel(f"layers of {plain(first)}", fontsize=9, color=QUIET)
    figure.suptitle("Linear CKA of the layers' activations", fontsize=10.5, color=INK, x=0.01, ha="left")
    _scale(figure, image, panels.ravel().tolist(), "linear CKA")
    write_png(figure, path)


def _weights(values: Array, picture: tuple[int, ...] | None) -> tuple[Array, str]:
    """The array to show for weights, and a description of it."""
    outputs, inputs = values.shape[:2]
    if values.ndim == 4 and inputs == 1:
        return _tiles(values[:_MOST_TILES, 0]), f"{_some(min(outputs, _MOST_TILES), outputs)} filters"
    if values.ndim == 4 and inputs == 3:
        tiles = np.moveaxis(values[:_MOST_TILES], 1, -1)
        return _tiles(0.5 + 0.5 * tiles / (np.abs(tiles).max() or 1.0)), (
            f"{_some(len(tiles), outputs)} filters, red, green and blue (gray: 0)"
        )
    if values.ndim == 4:
        shown = values[:_MOST_OUTPUTS, :_MOST_INPUTS]
        return _mosaic(shown), (
            f"{_some(shown.shape[0], outputs)} outputs (rows), {_some(shown.shape[1], inputs)} inputs (columns)"
        )
    flat = values.reshape(outputs, -1)
    if picture is not None and flat.shape[1] == int(np.prod(picture)):
        tiles = flat[:_MOST_TILES].reshape(-1, *picture)
        return _tiles(tiles), f"{_some(len(tiles), outputs)} units, their inputs as a picture"
    rows = flat[:_MOST_ROWS, :_MOST_COLUMNS]
    return rows, f"{_some(len(rows), outputs)} units (rows), {_some(rows.shape[1], flat.shape[1])} inputs (columns)"


def _tiles(tiles: Array) -> Array:
    """(n, height, width[, colors]) as a mosaic that is about as wide as high."""
    columns = ceil(sqrt(len(tiles)))
    rows = ceil(len(tiles) / columns)
    grid = np.full((rows * columns, *tiles.shape[1:]), np.nan)
    grid[: len(tiles)] = tiles
    return _mosaic(grid.reshape(rows, columns, *tiles.shape[1:]))


def _mosaic(grid: Array) -> Array:
    """(rows, columns, height, width[, colors]) as one picture, with a gap of NaN between tiles."""
    rows, columns, height, width, *colors = grid.shape
    gap = max(1, round(min(height, width) / 8))
    padding = [(0, 0), (0, 0), (0, gap), (0, gap), *[(0, 0) for _ in colors]]
    padded = np.pad(grid, padding, constant_values=np.nan)
    joined = padded.swapaxes(1, 2).reshape(rows * (height + gap), columns * (width + gap), *colors)
    return joined[:-gap, :-gap]


def _draw(path: Place, title: str, runs: Sequence[RunPart], beside: Array | None = None) -> None:
    """Panels of one scale in a row, with the colors' scale; `beside` them one in gray."""
    first = runs[0].values
    height, width = first.shape[:2]
    colored, rows_of_numbers = first.ndim == 3, beside is None and width > 2 * height
    wide = 4.2 if len(runs) < 3 else 3.3
    panel = (wide, wide * min(1.6, max(0.35, height / width)))
    ratios = [*([] if beside is None else [beside.shape[1] / width]), *(1.0 for _ in runs)]
    figure = _blank((panel[0] * sum(ratios) + 1.0, panel[1] + 1.0))
    panels: Any = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
    if beside is not None:
        panels[0].imshow(beside, cmap="gray_r")
        _bare(panels[0], "inputs", "")
    for axes, run in zip(panels[len(ratios) - len(runs) :], runs, strict=True):
        most = float(np.nanmax(np.abs(run.values))) or 1.0
        scale: dict[str, Any] = {} if colored else {"cmap": "RdBu_r", "norm": Normalize(-1, 1)}
        shown = np.where(np.isnan(run.values), 1.0, run.values) if colored else run.values / most
        image = axes.imshow(shown, aspect="auto" if rows_of_numbers else "equal", interpolation="nearest", **scale)
        _bare(axes, run.name, run.about if colored else f"{run.about}, largest {most:.3g}")
    figure.suptitle(plain(title), fontsize=10.5, color=INK, x=0.01, ha="left")
    if not colored:
        _scale(figure, image, list(panels), "value / the panel's largest")
    write_png(figure, path)


def _bare(axes: Axes, name: str, about: str) -> None:
    axes.set_title(plain(f"{name}\n{about}" if about else name), fontsize=9, color=INK, loc="left")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_facecolor("white")
    for spine in axes.spines.values():
        spine.set_color(GRID)


def _scale(figure: Figure, image: Any, panels: list[Axes], label: str) -> None:
    bar = figure.colorbar(image, ax=panels, fraction=0.03, pad=0.02, aspect=24)
    bar.ax.tick_params(labelsize=8, color=AXIS, labelcolor=INK)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=8.5, color=QUIET)


def _blank(inches: tuple[float, float]) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=inches, dpi=_DOTS_PER_INCH, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _some(shown: int, there: int) -> str:
    return f"{there:,}" if shown == there else f"the first {shown} of {there:,}"
