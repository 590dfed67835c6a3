"""A page that is complete in itself: it loads nothing and needs no network. plotly.js and the figures are in it."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from importlib.resources import files

from polytempo.report.pictures.figure import Figure
from polytempo.report.pictures.style import DARK, css_variables

PLOTLY = "plotly-basic.min.js.gz"
"""plotly.js-basic-dist-min 4.1.1 of npm, gzipped: lines, bars and axes without the other forty kinds of figures."""
WITHOUT_SCRIPT = "<noscript><p>The figures below need JavaScript; the numbers above do not.</p></noscript>"
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def document(title: str, facts: str, body: str, figures: Mapping[str, Figure]) -> str:
    """The page as HTML, about 0.6 MB: a header with `title` and one line of `facts`, and `body`, which is HTML.

    Each figure is drawn into the `place_of` it in the body.
    """
    plotly = files("polytempo.report").joinpath(PLOTLY).read_bytes()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{css_variables()}{report_asset("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<button type="button" id="mode"></button>
<p>{escape(facts)}</p>
</header>
<main>
{body}
</main>
<footer>Written by Polytempo. This file is complete in itself: it loads nothing from the network.</footer>
<script type="text/plain" id="figures">{_packed(_embedded(figures))}</script>
<script type="text/plain" id="plotly">{b64encode(plotly).decode()}</script>
<script>const DARK = {json.dumps(DARK)};
{report_asset("theme.js")}{report_asset("page.js")}</script>
</body>
</html>
"""


def place_of(key: str, figure: Figure, more_class: str = "", attribute: str = "") -> str:
    """The place of a figure, by its key."""
    height = figure.layout["height"]
    return f'<div class="plot {more_class}" id="{key}" style="height:{height}px" {attribute}></div>'


def _embedded(figures: Mapping[str, Figure]) -> str:
    """The figures as JSON; numbers with the six digits that a screen can show."""
    return json.dumps({key: _rounded(figure._asdict()) for key, figure in figures.items()}, separators=(",", ":"))


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _packed(text: str) -> str:
    """Text gzipped and in base64, which no text can break out of; the same for the same text."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def report_asset(name: str) -> str:
    """A file of the page."""
    return files("polytempo.report").joinpath(name).read_text(encoding="utf-8")
