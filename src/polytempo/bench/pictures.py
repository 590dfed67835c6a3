"""A benchmark's result as one picture (PNG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polytempo.bench.tables import NAMES, binary, duration
from polytempo.report.pages.summary import TIMES
from polytempo.report.pictures.canvas import (
    Axes,
    ConstrainedLayoutEngine,
    Figure,
    FigureCanvasAgg,
    FixedLocator,
    FuncFormatter,
    NullFormatter,
    NullLocator,
)
from polytempo.report.pictures.style import look

Rows = Sequence[Mapping[str, Any]]

_DOTS_PER_INCH = 140
_INK, _QUIET, _GRID = "#1F2933", "#52606D", "#E6E9EE"
_LINES = {
    ("ours", "any"): "ours, any tensor",
    ("ours", "arena"): "ours, arena",
    ("gloo", "any"): "gloo",
    ("mpi", "any"): "Open MPI",
    ("limit", "any"): "limit, any tensor",
    ("limit", "arena"): "limit, arena",
}


def write_picture(path: Path, result: Mapping[str, Any]) -> None:
    """Draw a result's rows into a PNG, which is there complete or not at all."""
    if result["benchmark"] == "compression":
        figure = _compression(result["rows"], result["settings"])
    else:
        draw = {"collectives": _collectives, "training": _training, "memory": _memory}[result["benchmark"]]
        figure = draw(result["rows"])
    machine = result["machine"]
    about = f"{machine['cpu']}, {machine['cores']} cores; torch {machine['torch']}; {result['begun'][:10]}"
    figure.text(0.995, 0.006, about, ha="right", va="bottom", fontsize=7, color=_QUIET)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _blank(width: float, height: float) -> Figure:
    room_for_machine = ConstrainedLayoutEngine(rect=(0, 0.22 / height, 1, 1 - 0.22 / height))
    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, facecolor="white", layout=room_for_machine)
    FigureCanvasAgg(figure)
    return figure


def _collectives(rows: Rows) -> Figure:
    """Time over size: a row of panels for each operation, a column for each number of ranks."""
    operations, ranks = _distinct(rows, "operation"), _distinct(rows, "ranks")
    figure = _blank(1.2 + 3.6 * len(ranks), 0.9 + 2.5 * len(operations))
    panels = figure.subplots(len(operations), len(ranks), squeeze=False)
    seen: dict[str, Any] = {}
    for line, operation in enumerate(operations):
        for column, size in enumerate(ranks):
            axes = panels[line][column]
            own = [row for row in rows if (row["operation"], row["ranks"]) == (operation, size)]
            seen |= _panel(axes, own)
            _dress(axes, f"{operation}, {size} ranks")
            axes.set_ylabel("time a call" if column == 0 else "", fontsize=8.5, color=_QUIET)
    figure.legend(
        list(seen.values()),
        list(seen),
        loc="outside upper center",
        ncols=min(len(seen), 3),
        frameon=False,
        fontsize=8.5,
    )
    return figure


def _panel(axes: Axes, rows: Rows) -> dict[str, Any]:
    handles = {}
    for number, ((who, tensors), label) in enumerate(_LINES.items()):
        points = [(row["bytes"], row[who]) for row in rows if row["tensors"] == tensors and row[who]]
        if points:
            style = look(number)
            x, y = [size for size, _ in points], [each["median_us"] for _, each in points]
            dash = "--" if who == "limit" else "-"
            options: dict[str, Any] = {"color": style.color, "marker": style.symbol.matplotlib, "linestyle": dash}
            (handles[label],) = axes.plot(x, y, markersize=4, linewidth=1.5, **options)
            axes.fill_between(
                x, [p["low_us"] for _, p in points], [p["high_us"] for _, p in points], color=style.color, alpha=0.12
            )
    sizes = sorted({row["bytes"] for row in rows})
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: duration(value).replace(".00", "")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if sizes != [0]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: binary(round(value))))
    else:
        axes.set_xticks([])
    axes.xaxis.set_minor_locator(NullLocator())
    return handles


def _training(rows: Rows) -> Figure:
    """Throughput relative to one process: a panel a model, a bar a configuration, the quartiles as a thin line."""
    models = _distinct(rows, "model")
    configurations = [name for name in NAMES if any(row["configuration"] == name for row in rows)]
    figure = _blank(8.0, 0.7 + sum(0.6 + 0.3 * sum(row["model"] == model for row in rows) for model in models))
    heights = [1 + sum(row["model"] == model for row in rows) for model in models]
    panels = figure.subplots(len(models), 1, squeeze=False, height_ratios=heights, sharex=True)
    for (axes,), model in zip(panels, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        ratios = [row["ratios"]["one_thread"] for row in own]
        colors = [look(configurations.index(row["configuration"])).color for row in own]
        _bars(axes, [NAMES[row["configuration"]] for row in own], [each["median"] for each in ratios], colors)
        for place, each in enumerate(ratios):
            axes.plot([each["low"], each["high"]], [place, place], color=_INK, linewidth=0.9)
            axes.annotate(f"{each['median']:.2f}{TIMES}", (max(each["median"], each["high"]), place), **_BESIDE)
        axes.axvline(1, color=_QUIET, linewidth=0.8, linestyle=":")
        _dress(axes, model)
    panels[-1][0].set_xlabel("samples per second, relative to one process with one thread", fontsize=8.5, color=_QUIET)
    panels[-1][0].margins(x=0.18)
    return figure


def _memory(rows: Rows) -> Figure:
    """Peak memory of all workers, a bar a configuration."""
    figure = _blank(8.0, 1.3 + 0.4 * len(rows))
    axes = figure.subplots()
    peaks = [row["peak_bytes"] / 2**30 for row in rows]
    _bars(axes, [NAMES[row["configuration"]] for row in rows], peaks, [look(n).color for n in range(len(rows))])
    for place, row in enumerate(rows):
        axes.annotate(f"{binary(row['peak_bytes'])} ({row['ratio']:.2f}{TIMES})", (peaks[place], place), **_BESIDE)
    axes.margins(x=0.2)
    axes.set_xlabel("peak memory of all workers, GiB", fontsize=8.5, color=_QUIET)
    _dress(axes, f"{rows[0]['workers']} workers, {rows[0]['parameters']:,} parameters, Adam")
    return figure


def _compression(rows: Rows, settings: Mapping[str, Any]) -> Figure:
    """Time a step over the link's speed, a line a codec; the link that was asked for is a dotted line."""
    figure = _blank(8.0, 4.6)
    axes = figure.subplots()
    speeds = [10 ** (6 + place / 20) for place in range(101)]
    plain = {**settings["uncompressed"], "codec": "uncompressed"}
    for number, row in enumerate([plain, *rows]):
        fixed_s = row["computing_s"] + row["rounds"] * settings["latency_s"]
        times_us = [1e6 * (fixed_s + row["serial_bytes"] * 8 / bits) for bits in speeds]
        style = look(number)
        width = 2.2 if row is plain else 1.3
        options: dict[str, Any] = {"color": style.color, "linestyle": style.dash.matplotlib, "linewidth": width}
        axes.plot(speeds, times_us, label=row["codec"], **options)
    axes.axvline(8 * settings["bytes_per_s"], color=_QUIET, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: duration(value).replace(".00", "")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("link of each host, bit/s", fontsize=8.5, color=_QUIET)
    axes.legend(fontsize=7, frameon=False, ncols=2)
    _dress(axes, f"exchange of a step, {settings['workers']} workers, {settings['parameters']:,} parameters")
    return figure


_BESIDE: dict[str, Any] = {
    "xytext": (5, 0),
    "textcoords": "offset points",
    "va": "center",
    "fontsize": 8,
    "color": _INK,
}


def _bars(axes: Axes, names: list[str], lengths: list[float], colors: list[str]) -> None:
    axes.barh(range(len(names)), lengths, height=0.66, color=colors)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9.5, color=_INK, loc="left")
    axes.tick_params(labelsize=7.5, color="#9AA5B1", labelcolor=_INK)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _distinct(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))
