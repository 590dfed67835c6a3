"""The timeline of a few steps: a row a rank, computation above communication, a color an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from polytempo.report.pages.summary import human_bytes
from polytempo.report.pictures.figure import Figure, empty_figure
from polytempo.report.pictures.style import COMMUNICATION_COLORS, COMPUTE_COLORS, GRID, PAPER
from polytempo.report.runs import RunRecord
from polytempo.worlds.trace import COMMUNICATION, WAITING, Event

MAX_RANKS = 16
MAX_BARS = 3000
NUM_STEPS = 4


WORDS = {
    "compute": "gradient and step",
    "send": "send",
    "recv": "wait for a message",
    "post": "send a message",
    "take": "wait for messages",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "score": "test",
    "save": "checkpoint",
}
"""Readers' words for operations; the others keep their names."""


class Timeline(NamedTuple):
    """A figure, the colors of its operations, and a sentence on the part of the run in it."""

    figure: Figure
    colors: dict[str, str]
    caption: str


def timeline(run: RunRecord, num_steps: int = NUM_STEPS) -> Timeline | None:
    """The operations of some steps from the middle of the trace. None where nothing was traced."""
    shown = excerpt(run.events, num_steps)
    if not shown:
        return None
    begin_s = min(event.start_s for event in shown)
    length_s = max(event.end_s for event in shown) - begin_s
    scale, unit = _unit(length_s)
    ranks = sorted({event.rank for event in shown})
    lanes = sorted({_lane(event.op) for event in shown})
    colors = operation_colors(sorted({event.op for event in shown}, key=lambda op: (_lane(op), op)))
    title = f"{'Virtual time' if run.simulated else 'Time'} since the first bar ({unit})"
    figure = empty_figure(100 + max(28, 18 * len(lanes)) * len(ranks), title, "Rank")
    for op, color in colors.items():
        events = [event for event in shown if event.op == op]
        height = 0.84 / len(lanes)
        offset = -0.42 + height * (lanes.index(_lane(op)) + 0.5)
        figure.data.append(
            {
                "type": "bar",
                "name": WORDS.get(op, op),
                "orientation": "h",
                "base": [(event.start_s - begin_s) * scale for event in events],
                "x": [(event.end_s - event.start_s) * scale for event in events],
                "y": [ranks.index(event.rank) + offset for event in events],
                "width": height * 0.94,
                "marker": {"color": color, "line": edges(events, color, length_s)},
                "hovertext": [_description(event, scale, unit) for event in events],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    _rows(figure, ranks)
    return Timeline(figure, colors, _caption(run, shown, ranks))


def _rows(figure: Figure, ranks: Sequence[int]) -> None:
    """A row a rank, the first on top, with a line between them."""
    figure.layout.update(barmode="overlay", bargap=0)
    figure.yaxis.update(
        tickvals=list(range(len(ranks))),
        ticktext=[str(rank) for rank in ranks],
        range=[len(ranks) - 0.5, -0.5],
        showgrid=False,
        ticks="",
    )
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": GRID, "width": 1}}
    figure.layout["shapes"] = [{**across, "y0": row - 0.5, "y1": row - 0.5} for row in range(1, len(ranks))]


def excerpt(events: Sequence[Event], num_steps: int = NUM_STEPS) -> list[Event]:
    """The events of at most `num_steps` steps and `MAX_RANKS` ranks, `MAX_BARS` in all.

    The steps are consecutive and as near to the middle as possible, but so that ranks communicate in one of them,
    rather before the last, if they ever do: a strategy that averages every hundred steps shows how it averages.
    """
    ranks = sorted({event.rank for event in events})[:MAX_RANKS]
    while ranks:
        steps = _middle_steps(events, num_steps)
        shown = [event for event in events if event.step in steps and event.rank in ranks]
        if len(shown) <= MAX_BARS or (num_steps == 1 and len(ranks) == 1):
            return shown[:MAX_BARS]
        num_steps, ranks = (num_steps - 1, ranks) if num_steps > 1 else (1, ranks[: len(ranks) // 2])
    return []


def operation_colors(ops: Sequence[str]) -> dict[str, str]:
    """A color for every operation, the same in every run."""
    compute = [op for op in ops if op not in COMMUNICATION]
    quiet = {op: COMPUTE_COLORS[number % len(COMPUTE_COLORS)] for number, op in enumerate(compute)}
    return {op: quiet.get(op) or COMMUNICATION_COLORS[op] for op in ops}


def _middle_steps(events: Sequence[Event], num_steps: int) -> set[int]:
    steps = sorted({event.step for event in events if event.step >= 0})
    talking = {event.step for event in events if event.op in COMMUNICATION}
    starts = range(max(1, len(steps) - num_steps + 1))
    middle = (len(steps) - num_steps) / 2

    def merit(start: int) -> tuple[bool, bool, float]:
        window = steps[start : start + num_steps]
        return talking.isdisjoint(window), talking.isdisjoint(window[:-1]), abs(start - middle)

    best = min(starts, key=merit)
    return set(steps[best : best + num_steps])


def _lane(op: str) -> int:
    """Computation on top, then sends, then waits to receive."""
    return 0 if op not in COMMUNICATION else 2 if op in WAITING else 1


def _description(event: Event, scale: float, unit: str) -> str:
    sent = f"<br>{human_bytes(event.bytes)} sent" if event.bytes else ""
    peer = f" (rank {event.peer})" if event.peer >= 0 else ""
    duration = f"{(event.end_s - event.start_s) * scale:.4g} {unit}"
    return f"rank {event.rank}, step {event.step}<br>{WORDS.get(event.op, event.op)}{peer}: {duration}{sent}"


def edges(events: Sequence[Event], color: str, length_s: float) -> dict[str, object]:
    """White edges part the bars, but would hide short ones: those are edged in their own color."""
    wide = [event.end_s - event.start_s > 0.01 * length_s for event in events]
    return {"color": [PAPER if yes else color for yes in wide], "width": [1.0 if yes else 0.6 for yes in wide]}


def _unit(seconds: float) -> tuple[float, str]:
    return (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 3 else (1.0, "s")


def _caption(run: RunRecord, shown: Sequence[Event], ranks: Sequence[int]) -> str:
    steps = sorted({event.step for event in shown})
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    workers = int(run.result["workers"])
    who = "all ranks" if len(ranks) == workers else f"{len(ranks)} of {workers:,} ranks"
    before = (
        f" The trace keeps the end of a run: {run.dropped:,} operations before it are dropped." if run.dropped else ""
    )
    return f"{which[0].upper()}{which[1:]} of {run.result['steps']:,}, {who}.{before}"
