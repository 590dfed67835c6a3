"""The page's section about pipelines: the work of each stage over time, its waits, and the delay of its updates."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from polytempo.report.pages.summary import percent
from polytempo.report.pages.table import scrolling
from polytempo.report.pictures.figure import Figure, empty_figure
from polytempo.report.pictures.style import GRID
from polytempo.report.pictures.timeline import edges, excerpt
from polytempo.report.runs import RunRecord, short_labels
from polytempo.worlds.trace import Event

PASSES = {"forward": "#3A8FC4", "backward": "#D55E00", "weight gradients": "#C0609A", "update": "#4D4D4D"}
"""Computations of a stage, and their colors."""
_NUM_STEPS = 6
_MOST_STAGES = 16


class StagesPicture(NamedTuple):
    """A figure of some steps of the first replica, and the share of that time that each stage waited."""

    figure: Figure
    idle: list[float]


def has_stages(run: RunRecord) -> bool:
    """True if the run's model was cut into stages."""
    return bool(run.result.get("stages"))


def picture(run: RunRecord) -> StagesPicture | None:
    """A row a stage; a colored block is work, and a gap between blocks is a bubble. None without a trace."""
    stages: list[dict[str, Any]] = run.result["stages"][:_MOST_STAGES]
    events = [event for event in run.events if event.op in PASSES and event.rank < len(stages)]
    shown = [event for event in excerpt(events, _NUM_STEPS) if event.op in PASSES]
    if not shown:
        return None
    begin_s, end_s = min(event.start_s for event in shown), max(event.end_s for event in shown)
    scale, unit = (1e6, "µs") if end_s - begin_s < 1e-3 else (1e3, "ms") if end_s - begin_s < 3 else (1.0, "s")
    title = f"{'Virtual time' if run.simulated else 'Time'} since the first block ({unit})"
    figure = empty_figure(96 + 46 * len(stages), title)
    for op in PASSES:
        of_kind = [event for event in shown if event.op == op]
        if of_kind:
            figure.data.append(_blocks(of_kind, op, begin_s, end_s - begin_s, scale, unit))
    figure.layout.update(barmode="overlay", bargap=0)
    figure.yaxis.update(
        tickvals=list(range(len(stages))),
        ticktext=[f"stage {each['stage']}<br>{late(each)}" for each in stages],
        range=[len(stages) - 0.5, -0.5],
        showgrid=False,
        ticks="",
    )
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": GRID, "width": 1}}
    figure.layout["shapes"] = [{**line, "y0": row - 0.5, "y1": row - 0.5} for row in range(1, len(stages))]
    return StagesPicture(figure, [_idle(shown, rank) for rank in range(len(stages))])


def late(stage: dict[str, Any]) -> str:
    """The delay of the stage's updates, in words."""
    delay = stage["most_delay"]
    return "not late" if not delay else f"{delay} update{'s' * (delay > 1)} late"


def stages_table(runs: Sequence[RunRecord], pictures: dict[int, StagesPicture]) -> str:
    """A row a stage of each run."""
    headings = ("Strategy", "Stage", "Layers", "Parameters", "Updates", "Delay, mean", "Held", "Versions", "Waiting")
    rows = []
    for number, (run, label) in enumerate(zip(runs, short_labels(runs), strict=True)):
        for each in run.result.get("stages") or ():
            idle = pictures[number].idle if number in pictures else []
            layers = each["layers"]
            cells = (
                label,
                str(each["stage"]),
                ", ".join(layers) if len(layers) < 4 else f"{layers[0]} … {layers[-1]}",
                f"{each['parameters']:,}",
                f"{each['updates']:,}",
                f"{each['delay']:.2f}",
                str(each["held"]),
                str(each["versions"]),
                percent(idle[each["stage"]], 0) if each["stage"] < len(idle) else "-",
            )
            rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(rows)
    return scrolling(f'<table id="stages-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _blocks(
    events: Sequence[Event], op: str, begin_s: float, length_s: float, scale: float, unit: str
) -> dict[str, Any]:
    color = PASSES[op]
    return {
        "type": "bar",
        "name": op,
        "orientation": "h",
        "base": [(event.start_s - begin_s) * scale for event in events],
        "x": [(event.end_s - event.start_s) * scale for event in events],
        "y": [event.rank for event in events],
        "width": 0.72,
        "marker": {"color": color, "line": edges(events, color, length_s)},
        "hovertext": [
            f"stage {event.rank}, step {event.step}<br>{op}: {(event.end_s - event.start_s) * scale:.4g} {unit}"
            for event in events
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _idle(events: Sequence[Event], rank: int) -> float:
    """The share of the time from its first to its last block that a stage did not compute."""
    own = [event for event in events if event.rank == rank]
    if not own:
        return 1.0
    length_s = max(event.end_s for event in own) - min(event.start_s for event in own)
    return max(0.0, 1 - sum(event.end_s - event.start_s for event in own) / length_s) if length_s else 0.0
