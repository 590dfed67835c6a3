"""HTML of results for notebooks: tables without scripts and style sheets, in the notebook's own colours.

Notebooks have themes that no media query tells, so text and lines take the colour around them (`currentColor`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

FRAME = "max-width:64em;overflow-x:auto;margin:4px 0;font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"
"""The style of the element around anything that is shown."""
_CELL = (
    "vertical-align:top;padding:2px 12px 2px 0;text-align:{};background:transparent;color:inherit;border:0;"
    "white-space:{}"
)
_LINE = ";border-bottom:1px solid color-mix(in srgb,currentColor 30%,transparent)"


def facts_html(title: str, facts: Mapping[str, str]) -> str:
    """A title, and a line for each fact."""
    lines = "".join(
        f'<tr style="background:transparent"><th scope="row" style="{_cell("left")};font-weight:normal;opacity:.75">'
        f'{escape(name)}</th><td style="{_cell("left", "normal")}">{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f'<div style="{FRAME}"><strong>{escape(title)}</strong>{_table(lines)}</div>'


def rows_html(title: str, rows: Sequence[Mapping[str, str]]) -> str:
    """A title, and a table with a column for each entry of the rows; the first one is text, the others are numbers."""
    names = list(rows[0]) if rows else []
    sides = ["left", *("right" for _ in names[1:])]
    columns = list(zip(names, sides, strict=True)) if names else []
    head = "".join(f'<th scope="col" style="{_cell(side)}{_LINE}">{escape(name)}</th>' for name, side in columns)
    lines = "".join(
        '<tr style="background:transparent">'
        + "".join(f'<td style="{_cell(side)}">{escape(row[name])}</td>' for name, side in columns)
        + "</tr>"
        for row in rows
    )
    return f'<div style="{FRAME}"><strong>{escape(title)}</strong>{_table(f"<tr>{head}</tr>{lines}")}</div>'


def _table(lines: str) -> str:
    return (
        f'<table style="border-collapse:collapse;border:0;margin:2px 0;color:inherit;font-size:inherit">{lines}</table>'
    )


def _cell(side: str, space: str = "nowrap") -> str:
    return _CELL.format(side, space)
