"""`ChartMark`: a fault, a new group or a diagnosis of a run, and its place on the axes of charts.

step 1,200 ──rows of training──▶ 31.4 s, 76,800 samples, epoch 2.1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polytempo.report.pictures.figure import Figure
from polytempo.report.pictures.style import COLORS
from polytempo.report.status.records import CheckpointSaved, Diagnosis, GroupStatus, ProcessEvent, StreamRecord

MOST_MARKS = 50
"""Marks of one figure."""
_HIGH = 0.965
"""The height of a sign, as a part of the figure's."""


class MarkSign(NamedTuple):
    """The look of a kind of marks: a color of the light mode, plotly's symbol, and a letter of the same form."""

    color: str
    symbol: str
    letter: str


SIGNS = {
    "fault": MarkSign(COLORS[1], "triangle-up", "▲"),
    "group": MarkSign(COLORS[0], "diamond", "◆"),
    "checkpoint": MarkSign(COLORS[2], "circle", "●"),
    "diagnosis": MarkSign(COLORS[3], "square", "■"),
}


class ChartMark(NamedTuple):
    """A record that a chart shows at its moment."""

    kind: str
    """"fault", "group", "checkpoint" or "diagnosis"."""
    text: str
    step: float | None
    """None: not known, as in runs of earlier versions; then `at_s` gives the place."""
    at_s: float | None


def mark_of(record: StreamRecord) -> ChartMark | None:
    """The mark of a record; None for rows, logged values, the start and the end."""
    match record:
        case ProcessEvent():
            return ChartMark("fault", f"{record.who} {record.how}; {record.then}", record.step, record.at_s)
        case GroupStatus():
            text = f"group {record.generation}: {record.workers} workers from step {record.step:,}"
            return ChartMark("group", text, record.step, None)
        case CheckpointSaved():
            return ChartMark("checkpoint", f"checkpoint at step {record.step:,}", record.step, record.at_s)
        case Diagnosis():
            return ChartMark("diagnosis", record.text, record.step, record.at_s)
    return None


def marks_of(records: Iterable[StreamRecord]) -> list[ChartMark]:
    """The first 50 marks of faults, groups and diagnoses. Checkpoints, which are many, have none in a report."""
    found = (mark for record in records if (mark := mark_of(record)) is not None)
    return [mark for mark in found if mark.kind != "checkpoint"][:MOST_MARKS]


def places(marks: Sequence[ChartMark], axis: str, columns: Mapping[str, Any]) -> list[float | None]:
    """The place of each mark on `axis`, by `columns` of equal length: "step", "seconds", and the axis's own.

    Between two rows it is in proportion; before the first row and behind the last one it is at that row. None where
    there are no rows to find it by.
    """
    return [_place(mark, axis, columns) for mark in marks]


def _place(mark: ChartMark, axis: str, columns: Mapping[str, Any]) -> float | None:
    known, by = (mark.at_s, "seconds") if mark.step is None else (mark.step, "step")
    if by == axis:
        return known
    if known is None or not {by, axis} <= columns.keys():
        return None
    found = interpolated(known, columns[by], columns[axis])
    return None if found is None else float(found)


def interpolated(known: Any, x: Any, y: Any) -> Any:
    """The values of y at the places `known` of x, as in `places`. None where no row has both."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    there = np.isfinite(x) & np.isfinite(y)
    if not there.any():
        return None
    order = np.argsort(x[there], kind="stable")
    return np.interp(known, x[there][order], y[there][order])


def draw_marks(figure: Figure, found: Sequence[tuple[float, ChartMark]], texts: Sequence[str]) -> None:
    """A dotted line at each place, and a sign on top with its text (HTML), which a pointer reads."""
    if not found:
        return
    signs = [SIGNS[mark.kind] for _, mark in found]
    figure.layout["shapes"] = [
        *figure.layout.get("shapes", ()),
        *(
            {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
            | {"line": {"color": SIGNS[mark.kind].color, "width": 1, "dash": "dot"}}
            for x, mark in found
        ),
    ]
    figure.layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    figure.data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [x for x, _ in found],
            "y": [_HIGH] * len(found),
            "yaxis": "y2",
            "marker": {"symbol": [sign.symbol for sign in signs], "color": [sign.color for sign in signs], "size": 9},
            "text": list(texts),
            "hovertemplate": "%{text}<extra></extra>",
        }
    )
