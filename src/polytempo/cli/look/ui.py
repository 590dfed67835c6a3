"""`polytempo ui`."""

from __future__ import annotations

import sys
import webbrowser

from polytempo.cli.look.look_options import UiOptions
from polytempo.core.system.url_path import place
from polytempo.ui.address import listen
from polytempo.ui.companion import SHARE, check_installed


def ui(asked: UiOptions) -> None:
    """Serve the live page until Ctrl-C."""
    check_installed()
    from polytempo.ui.server import serve

    address = listen(asked.host, asked.port)
    print(f"{address.link}\nCtrl-C ends this page; the runs go on.", flush=True)
    if asked.open and not webbrowser.open(address.link):
        print("note: no browser was found; open the link yourself", file=sys.stderr)
    serve(place(asked.runs), address, share=SHARE)
