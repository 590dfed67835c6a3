"""The page's section about rounds of clients: who took part, and the spread of the clients' accuracies."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from polytempo.report.pages.own_numbers import own_line
from polytempo.report.pictures.figure import Figure, empty_figure, run_line
from polytempo.report.pictures.style import css, look
from polytempo.report.runs import RunRecord, short_labels
from polytempo.report.status.client_rounds import ROUND, ClientRounds
from polytempo.report.status.records import LoggedText

_BANDS = {"rgba(58,143,196,0.14)": ("max", "min"), "rgba(58,143,196,0.3)": ("p90", "p10")}
"""Pairs of quantiles by the color of the area between them, which both modes can have."""
_CELL, _LEFT = 10, 64


def rounds_in(run: RunRecord) -> dict[str, Any] | None:
    """The turns of the run's clients; see `ClientRounds.plain`."""
    found = ClientRounds()
    for each in run.logged:
        if isinstance(each, LoggedText) and each.name == ROUND:
            found.add(each.text)
    return found.plain()


def said_of(told: dict[str, Any]) -> str:
    """The turns in sentences."""
    of, rounds = f"of {told['clients']:,} clients took part in", f"{told['rounds']:,} rounds"
    if told["took_part"] is not None:
        turns = f"{told['least']:,} times at least, {told['median']:g} in the middle, {told['most']:,} at most"
        return f"{told['took_part']:,} {of} {rounds}: {turns}."
    mean = "?" if told["a_round"] is None else f"{told['a_round']:,.0f}"
    undrawn = f" {told['undrawn']:,} rounds had too many clients to draw." if told["undrawn"] else ""
    return f"{mean} {of} each of {rounds}, in the mean.{undrawn}"


def turns_picture(told: dict[str, Any]) -> str:
    """The table of clients and rounds as SVG: a fuller color is more turns."""
    parts, columns = told["parts"], len(told["parts"][0])
    wide, high = max(_CELL, 600 // columns), max(_CELL // 2, min(_CELL, 300 // len(parts)))
    most = max(map(max, parts)) or 1.0
    cells = list[str]()
    for row, line in enumerate(parts):
        first, end = (-(-each * told["clients"] // len(parts)) for each in (row, row + 1))
        who = f"client {first}" if end - first == 1 else f"clients {first:,} to {end - 1:,}"
        for column, part in enumerate(line):
            if part:
                begin = column * told["width"]
                last = min(told["rounds"], begin + told["width"]) - 1
                when = f"round {begin:,}" if begin == last else f"rounds {begin:,} to {last:,}"
                cells.append(
                    f'<rect x="{_LEFT + column * wide}" y="{row * high}" width="{wide - 1}" height="{high - 1}" '
                    f'fill-opacity="{0.15 + 0.85 * part / most:.2f}">'
                    f"<title>{who}, {when}: {100 * part:.3g}%</title></rect>"
                )
    width, height = _LEFT + columns * wide + 12, len(parts) * high
    label = 'font-size="11" fill="currentColor"'
    texts = [
        f'<text x="{_LEFT - 6}" y="10" text-anchor="end" {label}>client 0</text>',
        f'<text x="{_LEFT - 6}" y="{height}" text-anchor="end" {label}>{told["clients"] - 1:,}</text>',
        f'<text x="{_LEFT}" y="{height + 14}" {label}>round 0</text>',
        f'<text x="{width - 12}" y="{height + 14}" text-anchor="end" {label}>{told["rounds"] - 1:,}</text>',
    ]
    size = f'viewBox="0 0 {width} {height + 20}" width="{width}" height="{height + 20}"'
    said = html.escape(said_of(told))
    drawn = "".join(cells + texts)
    style = f'style="max-width:100%;height:auto;fill:{css(look(0).color)}"'
    return f'<svg role="img" aria-label="{said}" {size} {style}>{drawn}</svg>'


def accuracy_bands(runs: Sequence[RunRecord]) -> Figure | None:
    """The median accuracy of each run's clients over steps; of one run also the areas between quantiles."""
    lines = {number: line for number, run in enumerate(runs) if (line := own_line(run, "clients/median"))}
    if not lines:
        return None
    figure, names = empty_figure(320, "Round", "Accuracy of clients"), short_labels(runs)
    figure.yaxis.update(tickformat=".0%")
    for number, line in lines.items():
        hover = "%{y:.1%} in round %{x:,.0f}<extra></extra>"
        if len(runs) == 1:
            for color, pair in _BANDS.items():
                for name, fill in zip(pair, ("none", "tonexty"), strict=True):
                    edge = run_line(number, own_line(runs[number], f"clients/{name}"), name, f"{name} {hover}")
                    figure.data.append(edge | {"fill": fill, "fillcolor": color, "line": {"color": color, "width": 1}})
        text = html.escape(names[number], quote=False)
        figure.data.append(run_line(number, line, text, f"{text}<br>median {hover}"))
    return figure
