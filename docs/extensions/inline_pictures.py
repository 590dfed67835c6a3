"""Pictures in SVG become part of the page, so that they take its colours, light or dark."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx


def inline(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Replace the images of a page that are SVG by their text."""
    if app.builder.format != "html":
        return
    for image in list(doctree.findall(nodes.image)):
        if not image["uri"].endswith(".svg"):
            continue
        text = Path(app.srcdir, image["uri"]).read_text(encoding="utf-8")
        text = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)  # the page has it: static/polytempo.css
        label = escape(image.get("alt", ""), quote=True)
        text = text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
        image.replace_self(nodes.raw("", f'<div class="picture">{text}</div>', format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-resolved", inline)
    return {"parallel_read_safe": True}
