"""`NotebookView`: a run below the cell of a notebook that started it: a bar, its numbers, and a chart of its loss.

One display is replaced again and again, so a notebook keeps the last state. It is HTML without a script, in the colours
of the notebook.
"""

from __future__ import annotations

import math
import sys
from html import escape
from importlib import import_module
from operator import itemgetter
from typing import Any

from polytempo.spec.text.notebook_table import FRAME

MOST_POINTS = 240
"""A chart has no more points: every second one is left out when it has."""
WIDTH, HEIGHT = 480, 96
_ACCENT = "#2f7fd6"  # 4:1 on white, 4.5:1 on black


def in_kernel() -> bool:
    """True in a program of a Jupyter kernel, which shows HTML; False in IPython on a terminal, and elsewhere."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has loaded it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookView:
    """Shows a run called `title` in the cell that runs now."""

    def __init__(self, title: str) -> None:
        self._title, self._status, self._done = title, "started", 0.0
        self._points: list[tuple[int, float]] = []
        self._stride, self._seen = 1, 0
        self._notes: list[str] = []
        display: Any = import_module("IPython.display")
        self._handle = display.display(display.HTML(self.html()), display_id=True)
        self._html = display.HTML

    def add(self, step: int, loss: float | None, done: float | None, status: str) -> None:
        """Take a row of the run. `done`: its finished part, 0 to 1."""
        self._status, self._done = status, done or self._done
        self._seen += 1
        if loss is not None and math.isfinite(loss) and self._seen % self._stride == 0:
            self._points.append((step, loss))
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._stride *= 2

    def complete(self, status: str) -> None:
        """The run has ended well."""
        self._status, self._done = status or "finished", 1.0

    def note(self, text: str) -> None:
        """Show a sentence below the run."""
        self._notes.append(text)
        self.show()

    def show(self) -> None:
        """Replace the display by the present state."""
        self._handle.update(self._html(self.html()))

    def html(self) -> str:
        """The present state."""
        percent = f"{100 * self._done:.0f}"
        track = "max-width:100%;border-radius:3px;background:color-mix(in srgb,currentColor 15%,transparent)"
        bar = (
            f'<div role="progressbar" aria-label="progress" aria-valuenow="{percent}" '
            f'style="height:6px;width:{WIDTH}px;margin:4px 0;{track}">'
            f'<div style="height:6px;width:{percent}%;border-radius:3px;background:{_ACCENT}"></div></div>'
        )
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes[-5:])
        head = f"<strong>{escape(self._title)}</strong><div>{escape(self._status)}</div>"
        return f'<div style="{FRAME}">{head}{bar}{self._chart()}{notes}</div>'

    def _chart(self) -> str:
        """The loss against the steps, from its least to its greatest value."""
        if len(self._points) < 2:
            return ""
        points = sorted(self._points, key=itemgetter(0))  # rows of several workers do not come in order
        losses = [loss for _, loss in points]
        (first, _), (last, _), low, high = points[0], points[-1], min(losses), max(losses)
        height, length = high - low or 1.0, max(1, last - first)
        line = " ".join(
            f"{WIDTH * (step - first) / length:.1f},{4 + (HEIGHT - 8) * (high - loss) / height:.1f}"
            for step, loss in points
        )
        return (
            f'<svg role="img" aria-label="loss from {losses[0]:.4g} to {losses[-1]:.4g}" width="{WIDTH}" '
            f'height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" style="max-width:100%;height:auto;display:block">'
            f'<path d="M0 {HEIGHT - 1}H{WIDTH}" stroke="currentColor" stroke-opacity=".3"/>'
            f'<polyline points="{line}" fill="none" stroke="{_ACCENT}" stroke-width="1.5"/>'
            f'<text x="{WIDTH - 2}" y="12" text-anchor="end" font-size="11" fill="currentColor">'
            f"loss {high:.4g} to {low:.4g}, steps {first:,} to {last:,}</text></svg>"
        )
