"""The page's section about the user's own numbers, pictures and texts."""

from __future__ import annotations

import html
import math
from base64 import b64encode
from collections import deque
from collections.abc import Sequence

from polytempo.report.pictures.figure import Figure, Line, empty_figure, run_line
from polytempo.report.pictures.plots import MAX_POINTS, mark_one_run, windowed
from polytempo.report.runs import RunRecord, short_labels
from polytempo.report.status.client_rounds import ROUND
from polytempo.report.status.records import Logged, LoggedText

MOST_CHARTS, MOST_TEXTS = 24, 12
_MOST_SHOWN = 2000


def has_own(run: RunRecord) -> bool:
    """True if the run has the user's own numbers, pictures or texts."""
    own = (each for each in run.logged if not (isinstance(each, LoggedText) and each.name == ROUND))
    return any(isinstance(each, Logged | LoggedText) for each in own) or bool(run.pictures)


def names(runs: Sequence[RunRecord]) -> list[str]:
    """The names of all numbers, sorted."""
    return sorted({name for run in runs for each in run.logged if isinstance(each, Logged) for name in each.values})


def own_line(run: RunRecord, name: str) -> Line:
    """The number over steps; with several workers the mean of the last value of as many rows."""
    found = [
        (float(each.step), each.values[name], each.worker)
        for each in run.logged
        if isinstance(each, Logged) and name in each.values
    ]
    last = deque[float](maxlen=len({worker for _, _, worker in found}) or 1)
    line = list[tuple[float, float]]()
    for step, value, _ in sorted(found, key=lambda each: each[0]):
        last.append(value)
        line.append((step, math.fsum(last) / len(last)))
    return windowed(line, MAX_POINTS)


def own_curves(runs: Sequence[RunRecord], name: str) -> Figure:
    """A line for each run that has logged the number. One run's faults and diagnoses are marks."""
    figure, labels = empty_figure(300, "Step"), short_labels(runs)
    for number, run in enumerate(runs):
        if line := own_line(run, name):
            text = html.escape(labels[number], quote=False)
            hover = ("" if len(runs) == 1 else f"{text}<br>") + "%{y:.4g} at step %{x:,.0f}<extra></extra>"
            figure.data.append(run_line(number, line, text, hover))
    mark_one_run(figure, runs, "step")
    return figure


def pictures(runs: Sequence[RunRecord]) -> str:
    """The last picture of each name, in the page itself."""
    labels, shown = short_labels(runs), list[str]()
    for run, label in zip(runs, labels, strict=True):
        of_run = "" if len(runs) == 1 else f"{label}, "
        for picture in run.pictures:
            said = html.escape(f"{picture.name}, {of_run}step {picture.step:,}")
            source = f"data:image/png;base64,{b64encode(picture.content).decode()}"
            look = "max-width:100%;min-width:8rem;image-rendering:pixelated"
            image = f'<img src="{source}" alt="{said}" style="{look}">'
            shown.append(f'<figure class="card" style="margin:0">{image}<figcaption>{said}</figcaption></figure>')
    return f'<div class="grid">{"".join(shown)}</div>' if shown else ""


def texts(runs: Sequence[RunRecord]) -> str:
    """The last text of each name, in a table."""
    labels, rows = short_labels(runs), list[str]()
    for run, label in zip(runs, labels, strict=True):
        last = {each.name: each for each in run.logged if isinstance(each, LoggedText) and each.name != ROUND}
        for each in list(last.values())[:MOST_TEXTS]:
            of_run = "" if len(runs) == 1 else f"<td>{html.escape(label)}</td>"
            cut = each.text[:_MOST_SHOWN] + (" …" if len(each.text) > _MOST_SHOWN else "")
            rows.append(
                f'<tr>{of_run}<td>{html.escape(each.name)}</td><td class="number">{each.step:,}</td>'
                f'<td style="white-space:pre-wrap;text-align:left">{html.escape(cut)}</td></tr>'
            )
    if not rows:
        return ""
    run_head = "" if len(runs) == 1 else "<th>Run</th>"
    head = f'<tr>{run_head}<th>Text</th><th class="number">Step</th><th style="text-align:left">Content</th></tr>'
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
