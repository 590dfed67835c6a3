"""The page of a plan: time against money for each run that was compared, and the front that none beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from polytempo.report.pages.document import WITHOUT_SCRIPT, document, place_of
from polytempo.report.pages.summary import human_seconds
from polytempo.report.pictures.figure import Figure, empty_figure
from polytempo.report.pictures.style import COLORS, INK, css, look
from polytempo.report.runs import arguments, short_call

_HEADINGS = ("Workers", "Batch", "Time", "From", "To", "Hosts", "{money}", "Memory")
_MEBIBYTE = 1 << 20

Forecast = Mapping[str, Any]


class MarkerLook(NamedTuple):
    """The marker of a strategy's runs."""

    color: str
    symbol: str
    """The symbol's name in plotly."""
    is_open: bool
    """Drawn by its outline: beyond eight strategies colors and symbols come again."""


def plan_page(plan: Mapping[str, Any], sentences: Sequence[str], commands: Sequence[str]) -> str:
    """The page as HTML. `plan`: from `RunPlan.as_json`; `sentences`: the choice, and changes that would turn it."""
    looks = _looks(plan["forecasts"])
    figure = time_against_money(plan, looks)
    target = ", ".join(f"{measure} {value:g}" for measure, value in plan["until"].items())
    facts = f"{plan['job']} to {target} · {plan['cluster']} · {plan['runs']} runs compared"
    remarks = "".join(f'<p class="remark">{escape(each)}</p>' for each in sentences[1:])
    body = f"""<p class="headline">{escape(sentences[0])}</p>
{remarks}
<h2>The front of time against money</h2>
<p>No other run that was compared is both faster and cheaper. From and to hold nine of ten runs, as far as is known.</p>
{_table(plan, plan["front"])}
{WITHOUT_SCRIPT}
<h2>All runs</h2>
<section class="card"><p>Each mark is a run; the line is the front, a bar says where nine of ten runs end, and the ring
is the choice. Point at a mark for its workers and batch.</p>{place_of("plan", figure)}{_legend(looks)}</section>
<h2>Commands</h2>
{"".join(f"<p><code>{escape(each)}</code></p>" for each in commands)}
<h2>Not considered</h2>
<ul>{"".join(f"<li>{escape(each)}</li>" for each in plan["not_considered"])}</ul>
{_left_out("Batches at which a strategy was given up", plan["given_up"])}
{_left_out("Runs that were left out", plan["left_out"])}
"""
    return document(f"Plan for {plan['job']}", facts, body, {"plan": figure})


def time_against_money(plan: Mapping[str, Any], looks: Mapping[str, MarkerLook]) -> Figure:
    """A mark for each forecast, both axes logarithmic."""
    unit = money_unit(plan)
    figure = empty_figure(460, "Time to the target (s)", unit.capitalize())
    for axis in (figure.xaxis, figure.yaxis):
        axis |= {"type": "log", "dtick": "D2", "exponentformat": "e"}
    front = plan["front"]
    figure.data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "x": [each["seconds"] for each in front],
            "y": [each["money"] for each in front],
            "line": {"color": INK, "width": 1.5, "dash": "dot"},
            "hoverinfo": "skip",
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [each["high_s"] - each["seconds"] for each in front],
                "arrayminus": [each["seconds"] - each["low_s"] for each in front],
                "color": INK,
                "thickness": 1,
            },
        }
    )
    for call, mark in looks.items():
        own = [each for each in plan["forecasts"] if each["strategy"] == call]
        figure.data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [each["seconds"] for each in own],
                "y": [each["money"] for each in own],
                "marker": {"color": mark.color, "symbol": mark.symbol, "size": 8},
                "text": [escape(_what(each)) for each in own],
                "hovertemplate": f"%{{text}}<br>%{{x:.3g}} s, %{{y:.3g}} {unit}<extra></extra>",
            }
        )
    if (winner := plan["winner"]) is not None:
        ring = {"color": "rgba(0,0,0,0)", "size": 18, "line": {"color": INK, "width": 2}}
        point = {"x": [winner["seconds"]], "y": [winner["money"]]}
        figure.data.append({"type": "scatter", "mode": "markers", **point, "marker": ring, "hoverinfo": "skip"})
    return figure


def money_unit(plan: Mapping[str, Any]) -> str:
    """The plan's unit of money."""
    return "host hours" if plan["limits"]["price_per_host_hour"] is None else "money"


def _looks(forecasts: Sequence[Forecast]) -> dict[str, MarkerLook]:
    calls, found = sorted({each["strategy"] for each in forecasts}), {}
    for number, call in enumerate(calls):
        style, is_open = look(number), number >= len(COLORS)
        found[call] = MarkerLook(style.color, style.symbol.plotly + ("-open" if is_open else ""), is_open)
    return found


def _what(found: Forecast) -> str:
    return f"{found['strategy']}, {found['workers']} workers x {batch_of(found)}"


def batch_of(found: Forecast) -> str:
    """The batch of each worker, in words."""
    return f"{found['batch_size']}{' by speed' if found.get('balance') == 'speed' else ''}"


def _table(plan: Mapping[str, Any], rows: Sequence[Forecast]) -> str:
    headings = "".join(f"<th>{each.format(money=money_unit(plan).capitalize())}</th>" for each in _HEADINGS)
    calls = sorted({each["strategy"] for each in plan["forecasts"]})
    lines = []
    for each in rows:
        times = [human_seconds(each[key]) for key in ("seconds", "low_s", "high_s")]
        memory = f"{each['memory_bytes'] / _MEBIBYTE:,.3g} MiB"
        cells = [each["workers"], batch_of(each), *times, each["hosts"], f"{each['money']:.3g}", memory]
        best = ' class="best"' if each == plan["winner"] else ""
        row = "".join(f"<td{best}>{cell}</td>" for cell in cells)
        lines.append(f"<tr><th>{escape(short_call(each['strategy'], calls))}</th>{row}</tr>")
    table = f"<table><thead><tr><th>Strategy</th>{headings}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table, scrolls sideways">{table}</div>'


def _legend(looks: Mapping[str, MarkerLook]) -> str:
    calls = list(looks)
    items = "".join(
        f'<li><span class="square" style="{_square(mark)}"></span>'
        f'<span title="{escape(call)}">{escape(short_call(call, calls))}</span></li>'
        for call, mark in looks.items()
    )
    return f'<ul class="legend" aria-label="Strategies">{items}</ul>'


def _square(mark: MarkerLook) -> str:
    return f"border:3px solid {css(mark.color)}" if mark.is_open else f"background:{css(mark.color)}"


def _left_out(heading: str, rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    items = "".join(f"<li>{escape(row['what'])}: {escape(row['why'])}</li>" for row in rows)
    return f"<details><summary>{heading} ({len(rows)})</summary><ul>{items}</ul></details>"


def short_names(plan: Mapping[str, Any]) -> dict[str, str]:
    """Each strategy of the forecasts, as short as tells it from the others."""
    calls = sorted({each["strategy"] for each in plan["forecasts"]})
    return {call: short_call(call, calls) if arguments(call)[1] else call for call in calls}
