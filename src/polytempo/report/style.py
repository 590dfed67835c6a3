"""How a run looks: the same color, dash and marker in every figure, told apart without color too."""

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
    """What a run is drawn with."""

    color: str
    symbol: Symbol
    dash: Dash


# Okabe and Ito's palette for all kinds of color vision, its yellow (too pale on white) replaced by wine.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#4D4D4D")
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
    "all_gather": "#E69F00",
    "broadcast": "#6A3D9A",
    "barrier": "#4D4D4D",
    "send": "#D55E00",
    "recv": "#F0B27A",
    "post": "#D55E00",
    "take": "#F0B27A",
}


def look(number: int) -> LineStyle:
    """The look of run `number`: eight colors and markers, then again with another dash (32 in all)."""
    return LineStyle(COLORS[number % 8], SYMBOLS[number % 8], DASHES[number // 8 % len(DASHES)])
