"""The page of a sweep: the best trial, all trials as a table, and the score against each setting."""

from __future__ import annotations

from html import escape

from polytempo.report.pages.document import WITHOUT_SCRIPT, document, place_of
from polytempo.report.pictures.figure import Figure, empty_figure
from polytempo.report.pictures.style import COLORS, INK
from polytempo.report.saved_trials import SavedTrial, SavedTrials


def trials_page(found: SavedTrials) -> str:
    """The page as HTML."""
    names = list(dict.fromkeys(name for each in found.trials for name in each.settings))
    figures = {f"setting-{at}": _against(found, name) for at, name in enumerate(names)}
    pictures = "".join(
        f'<section class="card"><h3>{escape(name)}</h3>{place_of(f"setting-{at}", figures[f"setting-{at}"])}</section>'
        for at, name in enumerate(names)
    )
    ended = [each for each in found.trials if each.state != "running"]
    facts = " · ".join(
        [f"{len(ended)} of {found.num_trials} trials", *(f"{name} {value}" for name, value in found.facts.items())]
    )
    body = f"""<p class="headline">{escape(_headline(found))}</p>
<p><code>{escape(found.command)}</code></p>
<h2>Each setting</h2>
<p>Each mark is a trial, an open one was stopped early, and the ring is the best. Point at a mark for its settings.</p>
{WITHOUT_SCRIPT}
{pictures}
<h2>All trials</h2>
{_table(found, names)}
"""
    return document(f"Sweep of {found.title}", facts, body, figures)


def _headline(found: SavedTrials) -> str:
    best = found.best
    if best is None:
        return f"No trial has finished with {found.metric} yet."
    settings = ", ".join(f"{name} {_text(value)}" for name, value in best.settings.items())
    return f"The best {found.metric} is {_text(best.value)}, of trial {best.number}: {settings}."


def _against(found: SavedTrials, name: str) -> Figure:
    """The score of each trial against one setting."""
    figure = empty_figure(300, name, found.metric)
    there = [each for each in found.trials if each.value is not None and name in each.settings]
    numbers = all(isinstance(each.settings[name], int | float) for each in there)
    if numbers and found.space.get(name, "").endswith(":log"):
        figure.xaxis["type"] = "log"
    elif not numbers or "|" in found.space.get(name, ""):
        figure.xaxis["type"] = "category"
    for state, symbol in (("finished", "circle"), ("pruned", "circle-open")):
        own = [each for each in there if each.state == state]
        figure.data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [_place(each, name, figure) for each in own],
                "y": [each.value for each in own],
                "marker": {"color": COLORS[0], "symbol": symbol, "size": 9},
                "text": [escape(_told(each)) for each in own],
                "hovertemplate": "%{text}<br>%{y:.4g}<extra></extra>",
            }
        )
    if (best := found.best) is not None and name in best.settings:
        ring = {"color": "rgba(0,0,0,0)", "size": 18, "line": {"color": INK, "width": 2}}
        point = {"x": [_place(best, name, figure)], "y": [best.value]}
        figure.data.append({"type": "scatter", "mode": "markers", **point, "marker": ring, "hoverinfo": "skip"})
    return figure


def _place(trial: SavedTrial, name: str, figure: Figure) -> object:
    value = trial.settings[name]
    return str(value) if figure.xaxis.get("type") == "category" else value


def _told(trial: SavedTrial) -> str:
    return f"trial {trial.number}: " + ", ".join(f"{name} {_text(value)}" for name, value in trial.settings.items())


def _table(found: SavedTrials, names: list[str]) -> str:
    best = found.best
    headings = "".join(f"<th>{escape(each)}</th>" for each in (*names, found.metric, "Steps", "State"))
    lines = []
    for each in found.trials:
        mark = ' class="best"' if best is not None and each.number == best.number else ""
        cells = [*(_text(each.settings.get(name)) for name in names), _text(each.value), _text(each.steps)]
        cells.append(each.state if not each.why else f"{each.state}: {each.why}")
        row = "".join(f"<td{mark}>{escape(cell)}</td>" for cell in cells)
        page = f'<a href="{escape(each.run)}/report.html">{each.number}</a>' if each.run else str(each.number)
        lines.append(f"<tr><th>{page}</th>{row}</tr>")
    table = f"<table><thead><tr><th>Trial</th>{headings}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Trials">{table}</div>'


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
