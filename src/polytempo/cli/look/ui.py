"""`polytempo ui`."""

from __future__ import annotations

import sys
import webbrowser

from polytempo.cli.look.look_options import UiOptions
from polytempo.core.system.url_path import place


def ui(asked: UiOptions) -> None:
    """Serve the live page until Ctrl-C."""
    try:
        from polytempo.ui.server import serve
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the live page needs {error.name}, which is not installed: pip install 'polytempo[ui]'"
        ) from error

    def ready(link: str) -> None:
        print(f"{link}\nCtrl-C ends this page; the runs go on.", flush=True)
        if asked.open and not webbrowser.open(link):
            print("note: no browser was found; open the link yourself", file=sys.stderr)

    serve(place(asked.runs), host=asked.host, port=asked.port, ready=ready)
