"""Looks of runs: the same color, dash and marker in every figure, told apart without color too."""

from __future__ import annotations

from typing import NamedTuple


class Symbol(NamedTuple):
    """A marker: its names in plotly and matplotlib, and its outline in a box from -5 to 5 (empty: a circle)."""

    plotly: str
    matplotlib: str
    outline: str


class Dash(NamedTuple):
    """A line style: its names in plotly and matplotlib, and SVG's stroke-dasharray."""

    plotly: str
    matplotlib: str
    svg: str


class LineStyle(NamedTuple):
    """Line of a run: color, dash and marker."""

    color: str
    symbol: Symbol
    dash: Dash


# After Okabe and Ito's palette for all kinds of color vision. Each color has a contrast of at least 3 with its page: on
# white its orange, sky blue and yellow are too pale, so they are darker here; on black its blue and wine are lighter.
COLORS = ("#0072B2", "#D55E00", "#008A63", "#C0609A", "#A87400", "#3A8FC4", "#882255", "#4D4D4D")
SYMBOLS = (
    Symbol("circle", "o", ""),
    Symbol("square", "s", "-4,-4 4,-4 4,4 -4,4"),
    Symbol("diamond", "D", "0,-5 5,0 0,5 -5,0"),
    Symbol("triangle-up", "^", "0,-5 5,4 -5,4"),
    Symbol("triangle-down", "v", "0,5 5,-4 -5,-4"),
    Symbol("pentagon", "p", "0,-5 5,-1.5 3,4.5 -3,4.5 -5,-1.5"),
    Symbol("cross", "P", "-2,-5 2,-5 2,-2 5,-2 5,2 2,2 2,5 -2,5 -2,2 -5,2 -5,-2 -2,-2"),
    Symbol(
        "hexagram", "*", "0,-5 1.5,-2.5 4.5,-2.5 3,0 4.5,2.5 1.5,2.5 0,5 -1.5,2.5 -4.5,2.5 -3,0 -4.5,-2.5 -1.5,-2.5"
    ),
)
DASHES = (Dash("solid", "-", ""), Dash("dash", "--", "6 3"), Dash("dot", ":", "2 2"), Dash("dashdot", "-.", "6 2 2 2"))

# Computation is one quiet color; every kind of communication stands out from it.
COMPUTE_COLORS = ("#A9C4DE", "#7FB7A6", "#C9C3E0", "#B5D6E8")
COMMUNICATION_COLORS = {
    "all_reduce": "#D55E00",
    "reduce_scatter": "#882255",
    "all_gather": "#A87400",
    "broadcast": "#6A3D9A",
    "barrier": "#4D4D4D",
    "send": "#D55E00",
    "recv": "#F0B27A",
    "post": "#D55E00",
    "take": "#F0B27A",
}

PAPER, INK, QUIET, GRID, AXIS = "#FFFFFF", "#1F2933", "#52606D", "#E6E9EE", "#9AA5B1"
"""Colors of figures in the light mode."""
BACKDROP, LINE, ACCENT = "#F5F7F9", "#DFE3E8", "#0072B3"
"""Further colors of the page around them."""

DARK = {
    "#0072B2": "#58A6E8",
    "#D55E00": "#FF8B45",
    "#008A63": "#35C79A",
    "#C0609A": "#EE9CCB",
    "#A87400": "#EBBE4D",
    "#3A8FC4": "#8FD3FF",
    "#882255": "#C99BFF",
    "#4D4D4D": "#C3C9D1",
    "#A9C4DE": "#4A6784",
    "#7FB7A6": "#3F7566",
    "#C9C3E0": "#6A6391",
    "#B5D6E8": "#517688",
    "#6A3D9A": "#B08AE0",
    "#F0B27A": "#A5683A",
    PAPER: "#1B2129",
    INK: "#E6EAEF",
    QUIET: "#A7B1BD",
    GRID: "#2F3843",
    AXIS: "#66717F",
    BACKDROP: "#12161B",
    LINE: "#333D48",
    ACCENT: "#6CB6F2",
}
"""Colors of the dark mode by colors of the light one: figures and page are written in the light ones."""


def look(number: int) -> LineStyle:
    """The look of run `number`: eight colors and markers, then again with another dash (32 in all)."""
    return LineStyle(COLORS[number % 8], SYMBOLS[number % 8], DASHES[number // 8 % len(DASHES)])


def css(color: str) -> str:
    """A color of the light mode as CSS that follows the page's mode: `var(--c0072b2)`."""
    return f"var(--c{color[1:].lower()})"


def css_variables() -> str:
    """The definitions of the names of `css`, in both modes: the reader's choice goes before the system's."""
    light = "".join(f"--c{color[1:].lower()}:{color};" for color in DARK)
    dark = "".join(f"--c{color[1:].lower()}:{other};" for color, other in DARK.items())
    return (
        f":root{{color-scheme:light;{light}}}"
        f':root[data-mode="dark"]{{color-scheme:dark;{dark}}}'
        "@media screen and (prefers-color-scheme:dark)"
        f'{{:root:not([data-mode="light"]){{color-scheme:dark;{dark}}}}}'
    )
