"""`report.html`: one self-contained page about one run or several. It loads nothing and needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from polytempo.core.files import replace
from polytempo.report import plots, served
from polytempo.report.runs import RunRecord
from polytempo.report.style import look
from polytempo.report.summary import TIMES, baseline_sentences, labels
from polytempo.report.table import details_table, facts, summary_table, swatch, tiles
from polytempo.report.timeline import Timeline, timeline
from polytempo.worlds.trace import COMMUNICATION

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_SIMULATED = (
    "Runs marked “simulated” ran under a virtual clock: their seconds, throughput and shares of time are what the "
    "described cluster would take, not what this computer took."
)


def write_report(path: Path, runs: Sequence[RunRecord], *, title: str) -> None:
    """Write the page about `runs` (at least one) to `path`, complete or not at all."""
    if not runs:
        raise ValueError("a report needs at least one run; pass the records of the runs that finished")
    replace(path, page(runs, title=title))


def page(runs: Sequence[RunRecord], *, title: str) -> str:
    """The page as HTML, plotly.js included once."""
    figures: dict[str, go.Figure] = {}
    sections = _curves(runs, figures) + _bars(runs, figures) + _servers(runs, figures) + _timelines(runs, figures)
    simulated = f"<p>{_SIMULATED}</p>" if any(run.simulated for run in runs) else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(facts(runs))}</p>
</header>
<main>
{tiles(runs)}
<h2>Summary</h2>
<p>{escape(" ".join(baseline_sentences(runs)))}</p>
{simulated}
{summary_table(runs)}
<noscript><p>The figures below need JavaScript; the table above does not.</p></noscript>
{sections}
{details_table(runs)}
</main>
<footer>Written by Polytempo. This file is complete in itself: it loads nothing from the network.</footer>
<script type="application/json" id="figures">{_embedded(figures)}</script>
<script>{get_plotlyjs()}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _curves(runs: Sequence[RunRecord], figures: dict[str, go.Figure]) -> str:
    time = "virtual time" if all(run.simulated for run in runs) else "time"
    cards = [
        _curve_card(runs, figures, "loss", "seconds", f"Loss against {time}"),
        _curve_card(runs, figures, "loss", "samples", "Loss against samples"),
        _curve_card(runs, figures, "accuracy", "seconds", f"Accuracy against {time}"),
        _curve_card(runs, figures, "accuracy", "samples", "Accuracy against samples"),
    ]
    if not any(cards):
        return "<h2>Learning</h2><p>These runs left no metrics.</p>"
    advice = " Click a strategy in a legend to hide or show it in all figures." if len(runs) > 1 else ""
    no_accuracy = "" if any(cards[2:]) else " This job measures no accuracy."
    return (
        f"<h2>Learning</h2><p>Against time: how fast a strategy gets there on this hardware. Against samples: how much "
        f'it learns from the same data.{advice}{no_accuracy}</p><div class="grid">{"".join(cards)}</div>'
    )


def _curve_card(
    runs: Sequence[RunRecord], figures: dict[str, go.Figure], quantity: str, over: str, heading: str
) -> str:
    figure = plots.curves(runs, quantity, over)
    if figure is None:
        return ""
    return _card(figures, f"{quantity}-{over}", heading, "", figure, _run_legend(runs), lines=True)


def _bars(runs: Sequence[RunRecord], figures: dict[str, go.Figure]) -> str:
    against = f"How many times as many samples per second as the baseline; the dotted line is 1{TIMES}."
    cards = [
        _card(figures, "throughput", "Throughput", "Samples per second, all workers.", plots.throughput_bars(runs)),
        _card(figures, "speed-up", "Speed-up", against, plots.speed_up_bars(runs)),
        _card(
            figures,
            "communication",
            "Share of time in communication",
            "Time that a rank spent in communication, waiting for the others included.",
            plots.communication_bars(runs),
        ),
        _card(figures, "bytes", "Bytes sent per rank", "Over the whole run.", plots.bytes_bars(runs)),
    ]
    return f'<h2>Speed and communication</h2><div class="grid">{"".join(cards)}</div>'


def _servers(runs: Sequence[RunRecord], figures: dict[str, go.Figure]) -> str:
    if not any(served.has_server(run) for run in runs):
        return ""
    figure = served.staleness_bars(runs)
    caption = "Counted in each shard: how many updates its weights had between a worker's reading and its gradient."
    legend = _run_legend(runs, served.has_server) if len(runs) > 1 else ""
    card = "" if figure is None else _card(figures, "staleness", "Staleness", caption, figure, legend, lines=True)
    return (
        "<h2>Parameter server</h2><p>A worker is idle while it waits for the server's answers or for work.</p>"
        f"{served.staleness_table(runs)}<p></p>{card}<details><summary>Workers one by one</summary>"
        f"{served.workers_table(runs)}</details>{served.events_table(runs)}"
    )


def _timelines(runs: Sequence[RunRecord], figures: dict[str, go.Figure]) -> str:
    drawn = {number: drawing for number, run in enumerate(runs) if (drawing := timeline(run)) is not None}
    if not drawn:
        return "<h2>Timeline of a few steps</h2><p>These runs left no trace.</p>"
    names = labels(runs)
    first = next((n for n in drawn if not COMMUNICATION.isdisjoint(drawn[n].colors)), min(drawn))
    options = "".join(
        f'<option value="{number}"{" selected" if number == first else ""}>{escape(names[number])}</option>'
        for number in drawn
    )
    chooser = f'<label for="timeline-run">Run</label><select id="timeline-run" autocomplete="off">{options}</select>'
    panels = "".join(_timeline_panel(number, drawing, figures) for number, drawing in drawn.items())
    return (
        "<h2>Timeline of a few steps</h2><p>A row is a rank: computation above, communication below it. A bar of "
        "communication includes waiting for the others. Hover over a bar for its step, duration and bytes.</p>"
        f'<div class="card">{chooser}{panels}</div>'
    )


def _timeline_panel(number: int, drawing: Timeline, figures: dict[str, go.Figure]) -> str:
    key = f"timeline-{number}"
    figures[key] = drawing.figure
    items = "".join(
        f'<li><span class="square" style="background:{color}"></span>{escape(op)}'
        f'<span class="kind">{"communication" if op in COMMUNICATION else "computation"}</span></li>'
        for op, color in drawing.colors.items()
    )
    return (
        f'<div data-timeline="{number}" hidden><p>{escape(drawing.caption)}</p>'
        f'{_place(key, drawing.figure, "later")}<ul class="legend">{items}</ul></div>'
    )


def _card(
    figures: dict[str, go.Figure],
    key: str,
    heading: str,
    caption: str,
    figure: go.Figure,
    legend: str = "",
    *,
    lines: bool = False,
) -> str:
    figures[key] = figure
    text = f"<p>{escape(caption)}</p>" if caption else ""
    place = _place(key, figure, "", "data-lines" if lines else "")
    return f'<section class="card"><h3>{escape(heading)}</h3>{text}{place}{legend}</section>'


def _place(key: str, figure: go.Figure, more_class: str = "", attribute: str = "") -> str:
    height = figure.layout.height
    return f'<div class="plot {more_class}" id="{key}" style="height:{height}px" {attribute}></div>'


def _run_legend(runs: Sequence[RunRecord], shown: Callable[[RunRecord], bool] = lambda run: True) -> str:
    items = "".join(
        f'<li><button type="button" data-run="{number}" aria-pressed="true">{swatch(look(number))}'
        f"<span>{escape(label)}</span></button></li>"
        for number, label in enumerate(labels(runs))
        if shown(runs[number])
    )
    return f'<ul class="legend">{items}</ul>'


def _embedded(figures: dict[str, go.Figure]) -> str:
    """The figures as JSON that no text in them can break out of."""
    plain: dict[str, Any] = {key: json.loads(figure.to_json()) for key, figure in figures.items()}
    content = json.dumps(plain, separators=(",", ":"))
    return content.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return files("polytempo.report").joinpath(name).read_text(encoding="utf-8")
