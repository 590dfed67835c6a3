"""The page's section about parameter servers: how stale gradients were, how workers fared, and who died."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from polytempo.report.pages.summary import TIMES, percent
from polytempo.report.pages.table import scrolling
from polytempo.report.pictures.figure import Figure, empty_figure
from polytempo.report.pictures.style import look
from polytempo.report.runs import RunRecord, short_labels

_MOST_BARS = 60
"""A longer range of staleness is drawn in classes of several values."""
_MOST_WORKERS = 64
"""The table of workers shows so many of a run."""


def has_server(run: RunRecord) -> bool:
    """True if the run had a parameter server."""
    return bool(run.result.get("server"))


def staleness_bars(runs: Sequence[RunRecord]) -> Figure | None:
    """Shares of gradients by staleness, for each run with a server. None if no gradient was counted."""
    counts = {number: _counts(run) for number, run in enumerate(runs) if has_server(run)}
    counts = {number: count for number, count in counts.items() if count}
    if not counts:
        return None
    most = max(max(count) for count in counts.values())
    width = -(-(most + 1) // _MOST_BARS)
    figure = empty_figure(320, "Staleness (updates)", "Gradients (%)")
    names = short_labels(runs)
    for number, count in counts.items():
        classes = Counter[int]()
        for tau, gradients in count.items():
            classes[tau // width] += gradients
        total, name = sum(classes.values()), html.escape(names[number], quote=False)
        places = sorted(classes)
        figure.data.append(
            {
                "type": "bar",
                "x": [(place + 0.5) * width - 0.5 for place in places],
                "y": [classes[place] / total for place in places],
                "name": name,
                "meta": number,
                "marker": {"color": look(number).color, "line": {"width": 0}},
                "hovertext": [_span(place, width) for place in places],
                "hovertemplate": f"{name}<br>staleness %{{hovertext}}: %{{y:.2%}}<extra></extra>",
            }
        )
    figure.xaxis.update(range=[-0.5, most + 0.5], tick0=0, dtick=-(-(most + 1) // 12))  # whole numbers
    figure.yaxis.update(tickformat="~%", rangemode="tozero")
    figure.layout.update(barmode="group", bargap=0.15, bargroupgap=0.0)
    return figure


def staleness_table(runs: Sequence[RunRecord]) -> str:
    """A row a run: staleness in three numbers, and unused gradients."""
    headings = _headings(
        ("Strategy", ""),
        ("Shards", "copies of each"),
        ("Updates", ""),
        ("Staleness", "mean"),
        ("Staleness", "median"),
        ("Staleness", "99 %"),
        ("Dropped", "late, or had already"),
        ("Refused", ""),
    )
    rows = "".join(
        _row(
            label,
            f"{server['shards']} {TIMES} {1 + server['replicas']}",
            f"{server['updates']:,}",
            _or_nothing(server["staleness"]["mean"], ",.2f"),
            _or_nothing(server["staleness"]["p50"], ",d"),
            _or_nothing(server["staleness"]["p99"], ",d"),
            f"{server['dropped']:,}",
            f"{server['refused']:,}",
        )
        for label, server in _servers(runs)
    )
    return _table("staleness-table", headings, rows)


def workers_table(runs: Sequence[RunRecord]) -> str:
    """A row a worker of each run: its work, its rate, and the share of time that it waited."""
    headings = _headings(
        ("Strategy", ""),
        ("Worker", "in its last life"),
        ("Steps", ""),
        ("Samples", ""),
        ("Throughput", "samples/s"),
        ("Idle", "share of time waiting for the server"),
    )
    rows = ""
    for label, server in _servers(runs):
        workers = server["workers"]
        rows += "".join(_worker_row(label, worker) for worker in workers[:_MOST_WORKERS])
        if len(workers) > _MOST_WORKERS:
            rows += _row(label, f"and {len(workers) - _MOST_WORKERS:,} more", "", "", "", "")
    return _table("workers-table", headings, rows)


def events_table(runs: Sequence[RunRecord]) -> str:
    """A row a process that died or fell silent, under a heading; nothing where all lived."""
    rows = "".join(
        _row(label, event["who"], event["how"], f"{event['at_s']:,.1f}", event["then"])
        for label, server in _servers(runs)
        for event in server.get("events", [])
    )
    if not rows:
        return ""
    headings = _headings(("Strategy", ""), ("Process", ""), ("What happened", ""), ("When", "s"), ("Then", ""))
    return f"<h3>What happened to processes</h3>{_table('events-table', headings, rows)}"


def _worker_row(label: str, worker: dict[str, Any]) -> str:
    return _row(
        label,
        str(worker["worker"]),
        f"{worker['steps']:,}",
        f"{worker['samples']:,}",
        f"{worker['samples_per_s']:,.0f}",
        percent(worker["idle_share"], 1),
    )


def _servers(runs: Sequence[RunRecord]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (label, run.result["server"]) for run, label in zip(runs, short_labels(runs), strict=True) if has_server(run)
    ]


def _counts(run: RunRecord) -> dict[int, int]:
    return {int(tau): int(count) for tau, count in run.result["server"]["staleness"]["histogram"]}


def _span(place: int, width: int) -> str:
    return str(place) if width == 1 else f"{place * width} to {(place + 1) * width - 1}"


def _or_nothing(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _headings(*pairs: tuple[str, str]) -> str:
    return "".join(f"<th>{escape(name)}<small>{escape(unit)}</small></th>" for name, unit in pairs)


def _row(label: str, *cells: str) -> str:
    data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(label)}</th>{data}</tr>'


def _table(name: str, headings: str, rows: str) -> str:
    return scrolling(f'<table id="{name}"><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>')
