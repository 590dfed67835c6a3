"""The page's section about divided layers: the parts of each worker, and the bytes that they send."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from polytempo.report.pages.summary import human_bytes
from polytempo.report.pages.table import scrolling
from polytempo.report.pictures.figure import Figure, empty_figure
from polytempo.report.pictures.style import AXIS, COLORS, GRID, PAPER
from polytempo.report.runs import RunRecord, short_labels

_MOST_LAYERS = 40
_MOST_NAMED = 8
"""Workers of a model that have a color of their own; later ones have these again."""
_WAYS = {"forward": "#A87400", "backward": "#882255"}
_WHOLE = AXIS


def has_parts(run: RunRecord) -> bool:
    """True if layers of the run's model were divided among several workers."""
    return bool(run.result.get("layers"))


def colors(run: RunRecord) -> dict[str, str]:
    """Meanings of the picture's colors."""
    workers = max((len(each["sizes"]) for each in run.result["layers"]), default=0)
    named = {f"part {number}": COLORS[number % _MOST_NAMED] for number in range(min(workers, _MOST_NAMED))}
    return {**named, "whole on each": _WHOLE, **{f"sent {way}": color for way, color in _WAYS.items()}}


def picture(run: RunRecord) -> Figure:
    """A row a layer: shares of its parts on the left, bytes of a step on the right."""
    layers: list[dict[str, Any]] = run.result["layers"][:_MOST_LAYERS]
    figure = empty_figure(96 + 26 * len(layers), "share of the layer")
    workers = max(len(each["sizes"]) for each in layers)
    for number in range(workers):
        held = [(row, each) for row, each in enumerate(layers) if len(each["sizes"]) > number]
        figure.data.append(_shares(held, number))
    whole = [row for row, each in enumerate(layers) if not each["sizes"]]
    figure.data.append(_bar("whole on each", whole, [0.0] * len(whole), [1.0] * len(whole), _WHOLE, "whole on each"))
    most = max(max(each["forward_bytes"], each["backward_bytes"]) for each in layers)
    unit, scale = ("MB", 1e6) if most >= 1e6 else ("kB", 1e3)
    for place, (way, color) in enumerate(_WAYS.items()):
        figure.data.append(_sent(layers, way, color, scale, unit, (place - 0.5) * 0.36))
    figure.xaxis.update(domain=[0, 0.56], range=[0, 1], tickformat=".0%", showgrid=False)
    figure.layout["xaxis2"] = {
        **figure.xaxis,
        "domain": [0.62, 1],
        "rangemode": "tozero",
        "tickformat": "",
        "showgrid": True,
    }
    del figure.layout["xaxis2"]["range"]
    figure.layout["xaxis2"]["title"] = {**figure.xaxis["title"], "text": f"{unit} in a step"}
    figure.layout.update(barmode="overlay", bargap=0)
    figure.yaxis.update(
        tickvals=list(range(len(layers))),
        ticktext=[escape(each["layer"] or "(model)") for each in layers],
        range=[len(layers) - 0.5, -0.5],
        showgrid=False,
        ticks="",
    )
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": GRID, "width": 1}}
    figure.layout["shapes"] = [{**line, "y0": row - 0.5, "y1": row - 0.5} for row in range(1, len(layers))]
    return figure


def parts_table(runs: Sequence[RunRecord]) -> str:
    """A row a layer of each run."""
    headings = ("Strategy", "Layer", "Kind", "Parameters", "Parts", "Sent forward", "Sent backward")
    rows = []
    for run, label in zip(runs, short_labels(runs), strict=True):
        for each in run.result["layers"]:
            cells = (
                *(label, each["layer"] or "(model)", each["kind"], f"{each['parameters']:,}"),
                " + ".join(f"{size:,}" for size in each["sizes"]) or "whole",
                *(human_bytes(each["forward_bytes"]), human_bytes(each["backward_bytes"])),
            )
            rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return scrolling(f'<table id="parts-table"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>')


def _shares(held: Sequence[tuple[int, dict[str, Any]]], number: int) -> dict[str, Any]:
    totals = [sum(each["sizes"]) for _, each in held]
    begins = [sum(each["sizes"][:number]) / total for (_, each), total in zip(held, totals, strict=True)]
    sizes = [each["sizes"][number] / total for (_, each), total in zip(held, totals, strict=True)]
    hover = [
        f"{each['layer']}: part {number} has {each['sizes'][number]} of {total}"
        for (_, each), total in zip(held, totals, strict=True)
    ]
    return _bar(f"part {number}", [row for row, _ in held], begins, sizes, COLORS[number % _MOST_NAMED], hover)


def _sent(
    layers: Sequence[dict[str, Any]], way: str, color: str, scale: float, unit: str, offset: float
) -> dict[str, Any]:
    values = [each[f"{way}_bytes"] / scale for each in layers]
    rows = [row + offset for row in range(len(layers))]
    hover = [f"{each['layer']}: {value:.4g} {unit} {way}" for each, value in zip(layers, values, strict=True)]
    return {**_bar(way, rows, [0.0] * len(layers), values, color, hover), "xaxis": "x2", "width": 0.32}


def _bar(
    name: str, rows: Sequence[float], begins: Sequence[float], lengths: Sequence[float], color: str, hover: object
) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "orientation": "h",
        "base": list(begins),
        "x": list(lengths),
        "y": list(rows),
        "width": 0.72,
        "marker": {"color": color, "line": {"color": PAPER, "width": 1}},
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
    }
