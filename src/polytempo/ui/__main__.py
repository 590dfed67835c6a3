"""The page of a command that runs with `--ui`: a process that ends with it. See `companion`.

standard input     a line of JSON (a `CompanionOrder`), then nothing until the command ends
"""

from __future__ import annotations

import os
import socket
import sys
import threading

import msgspec

from polytempo.ui.address import Address
from polytempo.ui.companion import SHARE, CompanionOrder, quietly


def main() -> None:
    """Serve until standard input ends, and a moment longer if pages are open, so that they see the run's end."""
    quietly()
    order = msgspec.json.decode(sys.stdin.readline(), type=CompanionOrder)
    serving, over = threading.Event(), threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()
        if not serving.is_set():
            os._exit(0)

    threading.Thread(target=wait, name="polytempo-ui-input", daemon=True).start()
    from polytempo.core.system.url_path import place
    from polytempo.ui.server import serve

    serving.set()
    address = Address(order.host, socket.socket(fileno=order.descriptor), order.token)
    serve(place(order.root), address, over.wait, share=SHARE)


if __name__ == "__main__":
    main()
