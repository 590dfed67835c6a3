"""Matplotlib for pictures, without a screen.

Matplotlib's import fails where MPLBACKEND names a backend that it does not know. No picture uses it, so it ends no run.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

_named = os.environ.get("MPLBACKEND", "")
try:
    import_module("matplotlib")
except ValueError:
    del os.environ["MPLBACKEND"]
    for _name in [each for each in sys.modules if each.startswith("matplotlib.")]:
        del sys.modules[_name]  # which know the module that failed
    import_module("matplotlib")
    os.environ["MPLBACKEND"] = _named

from matplotlib.axes import Axes  # noqa: E402 - matplotlib is loaded above
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import LogNorm, Normalize  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import (  # noqa: E402
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from polytempo.core.system import files  # noqa: E402
from polytempo.core.system.url_path import Place  # noqa: E402

__all__ = [
    "Axes",
    "ConstrainedLayoutEngine",
    "Figure",
    "FigureCanvasAgg",
    "FixedLocator",
    "FuncFormatter",
    "Line2D",
    "LogLocator",
    "LogNorm",
    "MaxNLocator",
    "Normalize",
    "NullFormatter",
    "NullLocator",
    "plain",
    "write_png",
]


def write_png(figure: Figure, path: Place) -> None:
    """Write the picture, complete or not at all."""
    with files.aside(path) as stream:
        figure.savefig(stream, format="png")


def plain(text: str) -> str:
    """Text without formulas for matplotlib."""
    return text.replace("$", r"\$")
