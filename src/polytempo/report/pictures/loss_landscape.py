"""Pictures of a loss: between two models, in a plane through one, and while a learning rate grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from polytempo.core.system.url_path import Place
from polytempo.report.pictures.canvas import (
    Axes,
    Figure,
    FigureCanvasAgg,
    LogLocator,
    LogNorm,
    MaxNLocator,
    Normalize,
    plain,
    write_png,
)
from polytempo.report.pictures.style import AXIS, COLORS, GRID, INK, QUIET

_DOTS_PER_INCH = 110
_LOG_BEYOND = 20
"""Losses that differ by more than so many times are drawn on a logarithmic scale."""


def draw_line(path: Place, at: Sequence[float], losses: Sequence[float], names: tuple[str, str]) -> None:
    """Write a PNG of the loss along a line: `at` 0 is the first model, 1 the second one.

    NaN is left out: beyond a model running variances may fall below 0.
    """
    figure = _blank((7.4, 5.6))
    axes = figure.add_axes((0.1, 0.1, 0.87, 0.83))
    axes.plot(at, losses, color=COLORS[0], linewidth=1.8, marker="o", markersize=3)
    if _far_apart(losses):
        axes.set_yscale("log")
    for place, (name, side) in enumerate(zip(names, ("left", "right"), strict=True)):
        axes.axvline(place, color=QUIET, linewidth=0.8, linestyle=":")
        beside: dict[str, Any] = {"ha": side, "va": "top", "xytext": (4 - 8 * place, -4), "textcoords": "offset points"}
        axes.annotate(plain(name), (place, 1), xycoords=axes.get_xaxis_transform(), **beside, fontsize=8, color=INK)
    _dress(axes, "Training loss along the line between two models")
    axes.set_xlabel("way from one to the other", fontsize=9, color=QUIET)
    axes.set_ylabel("loss", fontsize=9, color=QUIET)
    write_png(figure, path)


def draw_rates(path: Place, rates: Sequence[float], losses: Sequence[float], marks: Mapping[str, float]) -> None:
    """Write a PNG of the loss against growing learning rates, with a line at each rate of `marks`."""
    figure = _blank((7.4, 4.8))
    axes = figure.add_axes((0.1, 0.12, 0.87, 0.8))
    axes.plot(rates, losses, color=COLORS[0], linewidth=1.8)
    axes.set_xscale("log")
    if _far_apart(losses):
        axes.set_yscale("log")
    for number, (name, rate) in enumerate(marks.items()):
        axes.axvline(rate, color=COLORS[1 + number], linewidth=1.2, linestyle=":")
        beside: dict[str, Any] = {"ha": "right", "va": "top", "xytext": (-5, -4 - 13 * number)}
        where: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(f"{name} {rate:.3g}", (rate, 1), **beside, **where, fontsize=9, color=INK)
    _dress(axes, "Training loss while the learning rate grows")
    axes.set_xlabel("learning rate", fontsize=9, color=QUIET)
    axes.set_ylabel("loss, smoothed", fontsize=9, color=QUIET)
    write_png(figure, path)


def draw_plane(path: Place, at: Sequence[float], losses: Sequence[Sequence[float]], name: str) -> None:
    """Write a PNG of contours: the loss at α along one direction (across) and β along another (upwards)."""
    figure = _blank((7.0, 6.0))
    axes, scale = figure.add_axes((0.12, 0.1, 0.7, 0.82)), figure.add_axes((0.86, 0.1, 0.025, 0.82))
    values = np.asarray(losses, dtype=np.float64)
    log = _far_apart(values.ravel().tolist())
    locator = LogLocator(subs=tuple(10 ** (k / 6) for k in range(6))) if log else MaxNLocator(18)
    shown = np.ma.masked_invalid(values)
    norm = LogNorm() if log else Normalize()
    filled = axes.contourf(at, at, shown, locator=locator, norm=norm, cmap="viridis_r", extend="both")
    lines = axes.contour(at, at, shown, levels=filled.levels, colors="white", linewidths=0.5)
    levels = list(lines.levels)
    axes.clabel(lines, levels[:: max(1, len(levels) // 6)], fmt="%.3g", fontsize=7)
    axes.plot([0], [0], marker="*", markersize=11, color=COLORS[1], markeredgecolor="white")
    figure.colorbar(filled, cax=scale, format="%.3g")
    _dress(axes, f"Training loss around {plain(name)}")
    axes.set_xlabel("along one random direction, in lengths of the filters", fontsize=9, color=QUIET)
    axes.set_ylabel("along another one", fontsize=9, color=QUIET)
    write_png(figure, path)


def _blank(inches: tuple[float, float]) -> Figure:
    figure = Figure(figsize=inches, dpi=_DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _far_apart(losses: Sequence[float]) -> bool:
    """True if the finite losses are far apart."""
    known = [loss for loss in losses if isfinite(loss)]
    return bool(known) and min(known) > 0 and max(known) > _LOG_BEYOND * min(known)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10.5, color=INK, loc="left", pad=8)
    axes.tick_params(labelsize=8.5, color=AXIS, labelcolor=INK)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
